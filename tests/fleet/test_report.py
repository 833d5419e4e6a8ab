"""Report of the use of GPU memory, from the data of a real Prometheus whose truth is known, and its formats."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import GIB
from gpumond.features.fleet.accounting import (
    Period,
    Price,
    TeamRule,
    make_accounts,
    price_of,
    total_usage,
    usage_by_group,
)
from gpumond.features.fleet.discovery import SeriesSample
from gpumond.features.fleet.report import UsageReport, read_teams
from tests.helpers.html_document import checked
from tests.helpers.prometheus import Prometheus
from tests.helpers.stubs import fleet

DAY = 1_790_035_200
"""A midnight in UTC."""
HOUR = 3600
SCRAPE_SECONDS = 30
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"


def of(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Truth:
    """Two hours of four machines, as OpenMetrics: two clusters have one of the same name; machine c has a gap.

    | machine | model | owner, GiB | hours |
    | x/a | H100 | ada, vision, train 40, of which 10 wasted | 2 |
    | x/a | H100 | grace without an agent 20 | the first |
    | y/a | A100 | ada, vision, serve 10, all idle | 2 |
    | x/c | H100 | carol 30; half an hour is not scraped | 2 |
    | x/d | H100 | joins in the second hour; linus 8 | 1 |

    Series of programs exist for the first two, with their jobs.
    """

    def __init__(self) -> None:
        self.families: dict[str, list[str]] = {}
        self.machine("x", "a", H100, 80, 62)
        self.owner("x", "a", H100, {"user": "ada", "pod_namespace": "vision", "workload": "train"}, 40, wasted=10)
        self.owner("x", "a", H100, {"user": "grace"}, 20, until=HOUR)
        self.machine("y", "a", A100, 40, 10)
        serve = {"user": "ada", "pod_namespace": "vision", "workload": "serve", "slurm_account": "physics"}
        self.owner("y", "a", A100, serve, 10, idle_held=10, idle_and_reclaimable=10, wasted=10)
        self.machine("x", "c", H100, 80, 30, gap=True)
        self.owner("x", "c", H100, {"user": "carol"}, 30, gap=True, wasted=0)
        self.machine("x", "d", H100, 80, 8, begin=HOUR)
        self.owner("x", "d", H100, {"user": "linus"}, 8, begin=HOUR)
        self.program("10", 40, {"user": "ada", "workload": "train", "job_id": "ray/7", "slurm_job": "6"})
        self.program("11", 20, {"user": "grace", "slurm_job": "8"}, until=HOUR)

    def add(
        self,
        name: str,
        labels: Mapping[str, str],
        number: float,
        begin: int = 0,
        until: int = 2 * HOUR,
        gap: bool = False,
    ) -> None:
        for replica in ("0", "1"):
            own = {"job": "gpumond", "replica": replica, **labels}
            series = name + "{" + ",".join(f'{key}="{text}"' for key, text in own.items()) + "}"
            for at in range(begin, until, SCRAPE_SECONDS):
                missed = gap and HOUR // 2 <= at < HOUR
                if name == "up" or not missed:
                    shown = 0 if missed else number
                    self.families.setdefault(name, []).append(f"{series} {shown} {DAY + at}")

    def machine(
        self, cluster: str, instance: str, model: str, size: int, used: int, begin: int = 0, gap: bool = False
    ) -> None:
        target = {"cluster": cluster, "instance": instance}
        device = {**target, "uuid": f"GPU-{cluster}-{instance}"}
        self.add("up", target, 1, begin, gap=gap)
        self.add("gpumond_device_info", {**device, "name": model, "parent_uuid": ""}, 1, begin, gap=gap)
        self.add("gpumond_device_memory_size_bytes", device, size * GIB, begin, gap=gap)
        self.add("gpumond_device_memory_used_bytes", device, used * GIB, begin, gap=gap)
        self.add("gpumond_devices", {**target, "state": "up"}, 1, begin, gap=gap)
        self.add("gpumond_devices", {**target, "state": "down"}, 0, begin, gap=gap)
        unattributed = 2 if (cluster, instance) == ("x", "a") else 0
        share = {**device, "share": "unattributed"}
        self.add("gpumond_device_memory_share_bytes", share, unattributed * GIB, begin, gap=gap)

    def owner(
        self,
        cluster: str,
        instance: str,
        model: str,
        owner: Mapping[str, str],
        used: int,
        begin: int = 0,
        until: int = 2 * HOUR,
        gap: bool = False,
        **measures: int,
    ) -> None:
        labels = {"cluster": cluster, "instance": instance, "model": model, **owner}
        for name, number in {"used": used, "idle_held": 0, **measures}.items():
            self.add(f"gpumond_owner_{name}_bytes", labels, number * GIB, begin, until, gap)

    def program(self, pid: str, used: int, owner: Mapping[str, str], until: int = 2 * HOUR) -> None:
        labels = {"cluster": "x", "instance": "a", "pid": pid}
        self.add("gpumond_process_info", {**labels, **owner}, 1, until=until)
        self.add("gpumond_process_memory_used_bytes", {**labels, "uuid": "GPU-x-a"}, used * GIB, until=until)

    def text(self) -> str:
        lines = []
        for name, samples in self.families.items():
            lines += [f"# TYPE {name} gauge", *samples]
        return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with the data of ``Truth``: backfilled data has no staleness, a short lookback replaces it."""
    directory = tmp_path_factory.mktemp("truth")
    (directory / "truth.txt").write_text(Truth().text())
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(directory / "truth.txt")]
    subprocess.run([*command, str(directory / "blocks")], check=True, capture_output=True)
    flags = (f"--query.lookback-delta={SCRAPE_SECONDS // 2}s", "--storage.tsdb.retention.time=100y")
    with Prometheus(directory / "prometheus", {}, flags=flags, blocks=directory / "blocks") as running:
        yield running.url


PERIOD = ("--from", of(DAY), "--to", of(DAY + 2 * HOUR))


def report(url: str, *arguments: str) -> Any:
    done = fleet("report", "--prometheus", url, *PERIOD, "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def column(answer: Any, by: str, field: str) -> dict[str | None, float | None]:
    return {row[by]: row[field] and round(row[field], 6) for row in answer["rows"]}


needs_prometheus = pytest.mark.needs("prometheus")


@needs_prometheus
def test_hours_are_exact_and_replicas_count_once(url: str):
    answer = report(url)
    used = {"ada": 100.0, "carol": 45.0, "grace": 20.0, "linus": 8.0, None: 4.0}
    assert column(answer, "user", "used_gibibyte_hours") == used
    wasted = {"ada": 40.0, "carol": 0.0, "grace": None, "linus": None, None: 4.0}
    assert column(answer, "user", "wasted_gibibyte_hours") == wasted
    assert answer["total"]["used_gibibyte_hours"] == pytest.approx(177.0)
    assert (answer["from"], answer["to"]) == (DAY, DAY + 2 * HOUR)


@needs_prometheus
def test_gap_is_stated_and_lowers_no_mean(url: str):
    answer = report(url)
    assert column(answer, "user", "coverage_ratio") == {"ada": 1, "carol": 0.75, "grace": 1, "linus": 1, None: 0.928571}
    means = {"ada": 50.0, "carol": 30.0, "grace": 10.0, "linus": 4.0, None: 2.0}
    assert column(answer, "user", "mean_gibibytes") == means
    assert answer["gaps"] == [{"machine": "c", "coverage_ratio": 0.75}]
    assert answer["total"]["coverage_ratio"] == pytest.approx(6.5 / 7)


@needs_prometheus
def test_gap_is_extrapolated_on_request_only(url: str):
    assert column(report(url, "--extrapolate"), "user", "used_gibibyte_hours")["carol"] == 60.0


@needs_prometheus
def test_period_without_data_is_not_zero(url: str):
    whole = fleet("report", "--prometheus", url, "--from", of(DAY - 22 * HOUR), "--to", of(DAY + 2 * HOUR))
    assert whole.returncode == 0
    (carol,) = [line.split() for line in whole.stdout.splitlines() if line.startswith("carol")]
    assert carol[1:3] + carol[-1:] == ["45.0", "30.0", "6.2%"]
    assert "Values are known for" in whole.stdout
    nothing = fleet("report", "--prometheus", url, "--from", of(DAY - 22 * HOUR), "--to", of(DAY - 21 * HOUR))
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "no series of owners" in nothing.stderr


@needs_prometheus
def test_groups_include_clusters_models_accounts_and_teams(url: str, tmp_path: Path):
    assert column(report(url, "--by", "cluster"), "cluster", "used_gibibyte_hours") == {"x": 157.0, "y": 20.0}
    machines = {(row["cluster"], row["machine"]) for row in report(url, "--by", "cluster,machine")["rows"]}
    assert machines == {("x", "a"), ("y", "a"), ("x", "c"), ("x", "d")}
    assert column(report(url, "--by", "account"), "account", "used_gibibyte_hours")["physics"] == 20.0
    assert column(report(url, "--by", "model"), "model", "used_gibibyte_hours") == {H100: 157.0, A100: 20.0}
    teams = tmp_path / "teams.yaml"
    teams.write_text("vision: [namespace=vis*]\nothers: [user=carol, user=grace]\n")
    answer = report(url, "--by", "team", "--teams", str(teams))
    assert column(answer, "team", "used_gibibyte_hours") == {"vision": 100.0, "others": 65.0, "": 8.0, None: 4.0}


@needs_prometheus
def test_jobs_are_read_from_series_of_programs(url: str):
    answer = report(url, "--by", "job,user")
    used = {(row["job"], row["user"]): row["used_gibibyte_hours"] for row in answer["rows"]}
    assert used == {("ray/7", "ada"): 80.0, ("slurm/8", "grace"): 20.0, (None, None): 4.0}
    assert column(answer, "job", "wasted_gibibyte_hours") == {"ray/7": None, "slurm/8": None, None: 4.0}


@needs_prometheus
def test_cost_depends_on_the_model(url: str):
    answer = report(url, "--price", "H100=4", "--price", "A100=1")
    assert column(answer, "user", "cost") == {"ada": 4.5, "carol": 2.25, "grace": 1.0, "linus": 0.4, None: 0.2}
    assert column(answer, "user", "wasted_cost")["ada"] == 1.5
    partly = fleet("report", "--prometheus", url, *PERIOD, "--price", "H100=4")
    assert "no --price for NVIDIA A100-SXM4-40GB" in partly.stderr
    assert [line.split()[-2] for line in partly.stdout.splitlines() if line.startswith(("ada", "carol"))] == [
        "-",
        "2.25",
    ]


@needs_prometheus
def test_report_has_several_formats(url: str, tmp_path: Path):
    command = ("report", "--prometheus", url, *PERIOD, "--by", "user", "--price", "2", "--limit", "2")
    shown = fleet(*command).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0][:4] == ["USER", "USED", "MEAN", "GIB"]
    assert lines[1] == ["ada", "100.0", "50.0", "20.0", "20.0", "40.0", "40%", "100%", "3.00", "1.50"]
    assert lines[3][:2] == ["TOTAL", "177.0"]
    assert "Machines with gaps: c (75% known)." in shown
    assert "rows left out: 3; to show all: --limit 0" in shown
    rows = [*csv.DictReader(io.StringIO(fleet(*command, "--format", "csv").stdout))]
    assert (rows[0]["from"], rows[0]["to"], rows[0]["user"]) == (of(DAY), of(DAY + 2 * HOUR), "ada")
    assert (rows[1]["used_gibibyte_hours"], rows[1]["coverage_ratio"]) == ("45", "0.75")
    file = tmp_path / "report.html"
    assert fleet(*command, "--html", str(file)).returncode == 0
    document = checked(file.read_text())
    texts = {"Cost of use", "Used memory of all", "40.0 of 100.0", "used", "wasted"}
    assert texts <= {*document.texts}
    assert datetime.fromtimestamp(DAY).strftime("%m-%d %H:%M") in document.texts


@needs_prometheus
def test_report_states_the_change_since_the_period_before(url: str):
    last = ("--from", of(DAY + HOUR), "--to", of(DAY + 2 * HOUR))
    answer = json.loads(fleet("report", "--prometheus", url, *last, "--compare", "--format", "json").stdout)
    assert (answer["total"]["mean_gibibytes"], answer["before"]["mean_gibibytes"]) == (90.0, 102.0)
    assert answer["before"]["used_gibibyte_hours"] == 87.0
    shown = fleet("report", "--prometheus", url, *last, "--compare").stdout
    assert (
        "Before: mean 102.0 GiB, 25% of used wasted, known for 83.3% of the time; the mean has changed by -12%."
        in shown
    )


def sample(value: float, **labels: str) -> SeriesSample:
    return SeriesSample({"job": "gpumond", "instance": "a", "model": "H100", **labels}, 0.0, value)


def test_device_that_cannot_be_read_is_a_part_of_its_machine():
    period = Period(0, 600, 60)
    found = make_accounts(
        period,
        [
            ("used", period, [sample(10.0 * GIB, user="ada")]),
            ("known", period, [sample(5.0)]),
            ("listed", period, [sample(10.0)]),
            ("any", period, [sample(10.0)]),
        ],
    )
    (row,) = usage_by_group(found, ("user",))
    assert (row.group, row.coverage, row.mean_gibibytes) == (("ada",), 0.5, 2.0)
    assert total_usage(found).coverage == 0.5


def test_gap_lowers_no_curve():
    first, second = Period(0, 600, 60), Period(600, 1200, 60)
    found = make_accounts(
        Period(0, 1200, 60),
        [
            *(("used", part, [sample(steps * GIB, user="ada")]) for part, steps in ((first, 10.0), (second, 4.0))),
            *(("known", part, [sample(steps)]) for part, steps in ((first, 10.0), (second, 4.0))),
            *(("listed", part, [sample(steps)]) for part, steps in ((first, 10.0), (second, 8.0))),
            *(("any", part, [sample(steps)]) for part, steps in ((first, 10.0), (second, 8.0))),
        ],
    )
    assert found.curves["used"] == [(300.0, GIB), (900.0, GIB)]
    assert [(each.known_seconds, each.expected_seconds) for each in found.coverage.values()] == [(840.0, 1200.0)]


def test_rows_without_data_have_unknown_measures():
    period = Period(0, 600, 60)
    (row,) = usage_by_group(
        make_accounts(period, [("used", period, [sample(60.0 * GIB, user="ada")])]), ("user",), (Price("", 1),)
    )
    assert (row.used_gibibyte_hours, row.wasted_gibibyte_hours, row.cost) == (1.0, None, None)


@pytest.mark.parametrize(
    ("seconds", "step", "parts"), [(60, 60, 1), (HOUR, 60, 30), (86_400, 60, 48), (30 * 86_400, 300, 48)]
)
def test_parts_cover_the_period(seconds: int, step: int, parts: int):
    period = Period.of(DAY + 7, DAY + 7 + seconds)
    found = [*period.parts()]
    assert (period.step_seconds, period.seconds, len(found)) == (step, seconds, parts)
    assert [each.end for each in found[:-1]] == [each.begin for each in found[1:]]
    assert (found[0].begin, found[-1].end) == (period.begin, period.end)


def test_longest_pattern_has_the_price():
    prices = (Price("", 1.0), Price("h100", 2.0), Price("H100 PCIe", 1.5))
    assert [price_of(model, prices) for model in ("NVIDIA H100 PCIe", "NVIDIA H100 SXM", "L4")] == [1.5, 2.0, 1.0]
    assert price_of("L4", prices[1:]) is None


def test_first_rule_of_a_team_matches():
    period = Period(0, 60, 60)
    found = make_accounts(period, [("used", period, [sample(1.0, user="ada"), sample(1.0, user="bob")])])
    rules = (TeamRule("vision", "user", "a*"), TeamRule("speech", "user", "*"))
    assert {row.group for row in usage_by_group(found, ("team",), teams=rules)} == {("vision",), ("speech",)}


@pytest.mark.parametrize("text", ["[]", "vision: ada", "vision: [ada]", "vision: [job=7]", "vision: [", "a: b: c"])
def test_invalid_file_of_teams_is_refused(text: str, tmp_path: Path):
    (tmp_path / "teams.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"teams\.yaml"):
        read_teams(tmp_path / "teams.yaml")


@pytest.mark.parametrize(
    ("name", "in_csv"),
    [
        ('=HYPERLINK("http://x")', """'=HYPERLINK("http://x")"""),
        ("-1+1", "'-1+1"),
        ("@SUM(1)", "'@SUM(1)"),
        ("\t=1", "'�=1"),
        ("<img src=x onerror=y>", "<img src=x onerror=y>"),
    ],
)
def test_name_of_a_workload_is_text_in_each_format(name: str, in_csv: str, capsys: pytest.CaptureFixture[str]):
    from gpumond.features.fleet import report as formats

    period = Period(0, 60, 60)
    shown = UsageReport(make_accounts(period, [("used", period, [sample(1.0, workload=name)])]), ("workload",))
    formats._print_csv(shown)
    rows = [*csv.reader(io.StringIO(capsys.readouterr().out))]
    assert rows[1][2] == in_csv
    formats._print_table(shown)
    assert "\t" not in capsys.readouterr().out
    assert checked(formats._html(shown))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prometheus is required"),
        (("--for", "long"), "--for 'long'"),
        (("--from", "yesterday"), "--from 'yesterday'"),
        (("--from", "2026-11-01", "--for", "1d"), "--from and --for"),
        (("--from", "2999-01-01"), "not in the future"),
        (("--price", "cheap"), "MODEL=AMOUNT"),
        (("--price", "H100=-1"), "MODEL=AMOUNT"),
        (("--by", "user,user"), "--by"),
        (("--by", "colour"), "--by"),
        (("--by", "team"), "--teams"),
        (("--limit", "-1"), "--limit"),
    ],
)
def test_wrong_use_of_report_exits_with_2(arguments: tuple[str, ...], message: str):
    refused = fleet("report", *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_report_checks_the_file_before_its_work(tmp_path: Path):
    missing = fleet("report", "--prometheus", "http://127.0.0.1:1", "--html", str(tmp_path / "none" / "report.html"))
    assert missing.returncode == 2
    assert "isn't a directory" in missing.stderr
