"""Report of the use of GPU memory: its queries in Prometheus, its rows, and the formats of the command."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from gpumond.features.fleet.discovery import Sample
from gpumond.features.fleet.report import LEVELS, MEASURES, Price, expression, usages
from tests.helpers.html_document import checked
from tests.helpers.stubs import fleet, prometheus_stub

GIB = 1 << 30
CURVES = [
    f"sum(namespace_user_workload:{metric}:sum)"
    for metric in ("gpumond_process_memory_used_bytes", "gpumond_wasted_bytes")
]
RULES = Path(__file__).parents[2] / "deploy/prometheus/gpumond.rules.yaml"


def test_report_reads_series_that_the_rules_record():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    for level in LEVELS.values():
        assert {f"{level.series}:{metric}:sum" for metric in (level.used, *MEASURES.values())} <= recorded


@pytest.mark.needs("promtool")
def test_expression_is_the_sum_of_the_hours_in_prometheus(tmp_path: Path):
    """Two owners of one user hold 1 and 3 GiB for an hour, a third one 2 GiB for half an hour; another job does not
    count."""
    name = "namespace_user_workload:gpumond_wasted_bytes:sum"
    labels = ('user="ada",workload="a"', 'user="ada",workload="b"', 'user="grace",workload="a"')
    values = (f"{GIB}x120", f"{3 * GIB}x120", f"{2 * GIB}x29 _x90")
    pairs = zip(labels, values, strict=True)
    series = [{"series": f'{name}{{job="gpumond",{own}}}', "values": text} for own, text in pairs]
    series.append({"series": f'{name}{{job="other",user="ada"}}', "values": f"{GIB}x120"})
    query = expression("namespace_user_workload", "gpumond_wasted_bytes", "user", "gpumond", 3600)
    expected = [{"labels": '{user="ada"}', "value": 4.0}, {"labels": '{user="grace"}', "value": 1.0}]
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": []}]
    tests[0]["promql_expr_test"] = [{"expr": query, "eval_time": "59m30s", "exp_samples": expected}]
    file = tmp_path / "report.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_are_those_who_waste_most_first():
    def sample(user: str, value: float) -> Sample:
        return Sample({"user": user} if user else {}, 0.0, value)

    columns = {"used": [sample("ada", 10.0), sample("grace", 5.0)], "wasted": [sample("grace", 4.0), sample("", 1.0)]}
    rows = usages(columns, "user", Price(2.0, 80 * GIB))
    assert [(row.name, row.used, row.wasted, row.cost) for row in rows] == [
        ("grace", 5.0, 4.0, 0.1),
        ("", 0.0, 1.0, 0.025),
        ("ada", 10.0, 0.0, 0.0),
    ]


@pytest.fixture
def url():
    now = time.time()
    vectors = {}
    for metric, hours in (("gpumond_process_memory_used_bytes", 100.0), *((each, 40.0) for each in MEASURES.values())):
        query = expression("namespace_user_workload", metric, "workload", None, 86400)
        vectors[query] = [({"workload": "train"}, now, hours), ({"workload": "a|b"}, now, hours / 4)]
    with prometheus_stub(vectors, {query: [(now - 60.0, 3e9), (now, 4e9)] for query in CURVES}) as url:
        yield url


def test_report_has_several_formats(url: str):
    price = ("--price", "2", "--gpu-memory", "80GiB")
    command = ("report", "--prometheus", url, "--by", "workload", "--for", "1d", *price)
    shown = fleet(*command)
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[:2] == [
        ["WORKLOAD", "USED", "IDLE", "IDLE+RECLAIMABLE", "WASTED", "OF", "USED", "COST"],
        ["train", "100.0", "40.0", "40.0", "40.0", "40%", "1.00"],
    ]
    rows = [*csv.reader(io.StringIO(fleet(*command, "--format", "csv").stdout))]
    hours = [f"{name}_gibibyte_hours" for name in ("used", "idle_held", "idle_and_reclaimable", "wasted")]
    assert rows[0] == ["workload", *hours, "cost"]
    assert rows[1] == ["train", "100", "40", "40", "40", "1"]
    markdown = fleet(*command, "--format", "markdown").stdout.splitlines()
    assert markdown[1].startswith("| --- | ---:")
    assert markdown[3].startswith(r"| a\|b | 25.0 |")
    (first,) = json.loads(fleet(*command, "--format", "json", "--limit", "1").stdout)
    assert (first["name"], first["wasted"], first["cost"]) == ("train", 40.0, 1.0)


@pytest.mark.parametrize(
    ("name", "in_csv", "in_markdown"),
    [
        ('=HYPERLINK("http://x")', """'=HYPERLINK("http://x")""", r'=HYPERLINK\("http\://x"\)'),
        ("-1+1", "'-1+1", "-1+1"),
        ("@SUM(1)", "'@SUM(1)", r"\@SUM\(1\)"),
        ("\t=1", "'?=1", "?=1"),
        ("<img src=x onerror=y>", "<img src=x onerror=y>", r"\<img src=x onerror=y\>"),
        ("[a](http://x) **b** `c` | d", "[a](http://x) **b** `c` | d", r"\[a\]\(http\://x\) \*\*b\*\* \`c\` \| d"),
    ],
)
def test_name_of_a_workload_is_text_in_each_format(name: str, in_csv: str, in_markdown: str):
    metrics = ("gpumond_process_memory_used_bytes", *MEASURES.values())
    queries = [expression("namespace_user_workload", metric, "workload", None, 604800) for metric in metrics]
    with prometheus_stub({query: [({"workload": name}, 1.0, 5.0)] for query in queries}) as url:
        command = ("report", "--prometheus", url, "--by", "workload")
        rows = [*csv.reader(io.StringIO(fleet(*command, "--format", "csv").stdout))]
        markdown = fleet(*command, "--format", "markdown").stdout.splitlines()
    assert rows[1][0] == in_csv
    assert markdown[2].startswith(f"| {in_markdown} | 5.0 |")


def test_report_without_recorded_series_names_the_rules():
    metrics = ("gpumond_process_memory_used_bytes", *MEASURES.values())
    queries = [expression("namespace_user_workload", metric, "user", None, 604800) for metric in metrics]
    with prometheus_stub({query: [] for query in queries}) as url:
        shown = fleet("report", "--prometheus", url)
    assert shown.returncode == 3
    assert "gpumond.rules.yaml" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prometheus is required"),
        (("--for", "long"), "--for: 'long'"),
        (("--price", "2"), "--gpu-memory"),
        (("--gpu-memory", "80GiB"), "--price and --gpu-memory"),
        (("--limit", "-1"), "--limit"),
    ],
)
def test_wrong_use_of_report_exits_with_2(arguments: tuple[str, ...], message: str):
    refused = fleet("report", *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_report_in_html_has_charts(url: str, tmp_path: Path):
    file = tmp_path / "report.html"
    shown = fleet("report", "--prometheus", url, "--by", "workload", "--for", "1d", "--html", str(file))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("WORKLOAD")
    document = checked(file.read_text())
    assert document.tags.count("svg") == 3
    texts = {"train", "a|b", "40.0 of 100.0 GiB-hours", "Used memory of all", "Wasted memory of all"}
    assert texts <= {*document.texts}
    missing = fleet("report", "--prometheus", url, "--html", str(tmp_path / "none" / "report.html"))
    assert missing.returncode == 2
    assert "is not a directory" in missing.stderr
