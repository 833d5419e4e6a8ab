"""Advice on sizes, from the data of a real Prometheus whose truth is known."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gpumond.facts.units import GIB, MIB
from gpumond.features.fleet.advise import advise_program, mig_profile
from tests.helpers.prometheus import Prometheus
from tests.helpers.stubs import fleet

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
HOUR, SCRAPE_SECONDS = 3600, 60
H100_BYTES, H200_BYTES = 81559 * MIB, 143771 * MIB


def truth(last: int) -> str:
    """Two hours of two machines, each in two replicas. On ``a``, ada's train needs 20 GiB, and twice 28 for five
    minutes; on ``b`` it needs 10 GiB on two devices, carol's short job runs for ten minutes, and leak begins with 5 GiB
    and needs 9 in the second hour.
    """
    families: dict[str, list[str]] = {}

    def add(name: str, labels: Mapping[str, str], number: float, begin: int = 0, end: int = 2 * HOUR) -> None:
        for replica in ("0", "1"):
            own = {"job": "gpumond", "replica": replica, **labels}
            series = name + "{" + ",".join(f'{key}="{text}"' for key, text in own.items()) + "}"
            for at in range(begin, end, SCRAPE_SECONDS):
                families.setdefault(name, []).append(f"{series} {number} {last - 2 * HOUR + at}")

    for instance, uuids, model, bytes_ in (("a", ("0",), H100, H100_BYTES), ("b", ("0", "1", "2"), A100, 40 * GIB)):
        for number in uuids:
            device = {"instance": instance, "uuid": f"GPU-{instance}{number}"}
            add("gpumond_device_info", {**device, "name": model, "parent_uuid": ""}, 1)
            add("gpumond_device_memory_size_bytes", device, bytes_)
            held = 0 if number == "2" else 20 * GIB
            add("gpumond_device_memory_share_bytes", {**device, "share": "live"}, held)
            add("gpumond_device_memory_share_bytes", {**device, "share": "unattributed"}, GIB)
    train, short = {"user": "ada", "workload": "train"}, {"user": "carol", "workload": "short"}
    leak = {"user": "carol", "workload": "leak"}
    for owner, instance, model, needed, count, begin, end in (
        (train, "a", H100, 28, 1, 0, 300),
        (train, "a", H100, 20, 1, 300, HOUR),
        (train, "a", H100, 28, 1, HOUR, HOUR + 300),
        (train, "a", H100, 20, 1, HOUR + 300, 2 * HOUR),
        (train, "b", A100, 10, 2, 0, 2 * HOUR),
        (short, "b", A100, 5, 1, 0, 600),
        (leak, "b", A100, 5, 1, 0, HOUR + 600),
        (leak, "b", A100, 9, 1, HOUR + 600, 2 * HOUR),
    ):
        labels = {"instance": instance, "model": model, **owner}
        add("gpumond_owner_needed_bytes", labels, needed * GIB, begin, end)
        add("gpumond_owner_device_processes", labels, count, begin, end)
    lines = []
    for name, samples in families.items():
        lines += [f"# TYPE {name} gauge", *samples]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("advice")
    (directory / "truth.txt").write_text(truth(int(time.time()) // 60 * 60))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(directory / "truth.txt")]
    subprocess.run([*command, str(directory / "blocks")], check=True, capture_output=True)
    flags = (f"--query.lookback-delta={SCRAPE_SECONDS // 2}s", "--storage.tsdb.retention.time=100y")
    with Prometheus(directory / "prometheus", {}, flags=flags, blocks=directory / "blocks") as running:
        yield running


def advice(prometheus: Prometheus, *arguments: str) -> Any:
    done = fleet("advise", "--prometheus", prometheus.url, "--for", "2h", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_prometheus = pytest.mark.needs("prometheus")


@needs_prometheus
def test_sizes_follow_from_the_highest_need(prometheus: Prometheus):
    rows = {(row["workload"], row["model"]): row for row in advice(prometheus)["rows"]}
    train = rows["train", H100]
    assert (train["needed_bytes"], train["usual_bytes"]) == (28 * GIB, 20 * GIB)
    assert (train["limit_bytes"], train["reserve_bytes"]) == (31 * GIB, 20 * GIB)  # 30.8 GiB, rounded up
    assert (train["per_device"], train["profile"]) == (2, "3g.40gb")
    on_a100 = rows["train", A100]
    assert (on_a100["limit_bytes"], on_a100["per_device"], on_a100["profile"]) == (11 * GIB, 3, "3g.20gb")
    assert on_a100["hours"] == pytest.approx(4, rel=0.02)
    short = rows["short", A100]
    assert short["needed_bytes"] == 5 * GIB
    assert short["limit_bytes"] is short["reserve_bytes"] is short["per_device"] is short["profile"] is None
    assert short["reason"] == "ran for less than 1 h"
    leak = rows["leak", A100]
    assert (leak["limit_bytes"], leak["needed_bytes"], leak["earlier_bytes"]) == (None, 9 * GIB, 5 * GIB)
    assert leak["reason"] == "needed more in the second half of the period"


@needs_prometheus
def test_saved_part_refers_to_devices_with_programs(prometheus: Prometheus):
    answer = advice(prometheus, "--headroom", "0%")
    assert answer["allocated_gibibyte_hours"] == pytest.approx(2 * 81559 / 1024 + 4 * 40, rel=0.02)
    hours = {(row["workload"], row["model"]): row["hours"] for row in answer["rows"]}
    advised = 28 * hours["train", H100] + 10 * hours["train", A100]
    advised += 5 * hours["short", A100] + 9 * hours["leak", A100]
    assert answer["advised_gibibyte_hours"] == pytest.approx(advised)


@needs_prometheus
def test_each_number_comes_from_a_printed_query(prometheus: Prometheus):
    answer = advice(prometheus, "--by", "user,workload")
    fields = {"needed": "needed_bytes", "earlier": "earlier_bytes", "usual": "usual_bytes", "hours": "hours"}
    for name, field in fields.items():
        found = prometheus.instant(answer["queries"][name], answer["at"])
        values = {
            tuple(each["metric"].get(label, "") for label in ("user", "workload", "model")): float(each["value"][1])
            for each in found
        }
        assert values == {(row["user"], row["workload"], row["model"]): row[field] for row in answer["rows"]}
    shown = fleet("advise", "--prometheus", prometheus.url, "--for", "2h", "--limit", "1").stdout
    assert "NEEDED: max by (workload, model) (max_over_time(gpumond_owner_needed_bytes[7200s]))" in shown
    assert "rows left out: 3; to show all: --limit 0" in shown


@needs_prometheus
def test_period_without_data_gives_no_advice(prometheus: Prometheus):
    nothing = fleet("advise", "--prometheus", prometheus.url, "--job", "other")
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "no series gpumond_owner_needed_bytes" in nothing.stderr


def of(needed: float, hours: float = 10.0, device: float | None = H100_BYTES, headroom: float = 0.1) -> Any:
    known = {"needed_bytes": needed * GIB, "earlier_bytes": needed * GIB, "usual_bytes": needed * GIB}
    return advise_program(("train",), H100, hours=hours, device_bytes=device, headroom_ratio=headroom, **known)


def test_limit_never_exceeds_the_device():
    assert of(78).limit_bytes == H100_BYTES
    assert of(78).per_device == 1
    assert of(200).limit_bytes is None
    unknown = of(10, device=None)
    assert (unknown.limit_bytes, unknown.per_device, unknown.profile) == (11 * GIB, None, None)


def test_short_or_empty_programs_get_no_limit():
    assert of(10, hours=0.9).limit_bytes is None
    assert of(0).limit_bytes is None


@pytest.mark.parametrize(
    ("model", "device", "limit_gibibytes", "name"),
    [
        (H100, H100_BYTES, 8, "1g.10gb"),
        (H100, H100_BYTES, 9.5, "2g.20gb"),
        (H100, H100_BYTES, 35, "3g.40gb"),
        (H100, H100_BYTES, 60, None),
        ("NVIDIA H200", H200_BYTES, 15, "1g.18gb"),
        ("NVIDIA H200", H200_BYTES, 30, "2g.35gb"),
        ("NVIDIA H200", H200_BYTES, 60, "3g.71gb"),
        (A100, 40 * GIB, 4, "1g.5gb"),
        ("NVIDIA A30", 24 * GIB, 5, "1g.6gb"),
        ("NVIDIA A30", 24 * GIB, 10, "2g.12gb"),
        ("NVIDIA A40", 48 * GIB, 1, None),
        ("NVIDIA L40S", 48 * GIB, 1, None),
    ],
)
def test_profile_is_the_smallest_that_is_large_enough(
    model: str, device: float, limit_gibibytes: float, name: str | None
):
    assert mig_profile(model, device, limit_gibibytes * GIB) == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prometheus is required"),
        (("--prometheus", "http://x", "--by", "machine"), "expected one or more of namespace, user"),
        (("--prometheus", "http://x", "--headroom", "much"), "expected a percentage such as 10%"),
        (("--prometheus", "http://x", "--limit", "-1"), "--limit must not be negative"),
        (("--prometheus", "http://x", "--for", "10s"), "--for must be at least one minute"),
    ],
)
def test_wrong_use_exits_with_2(arguments: tuple[str, ...], message: str):
    refused = fleet("advise", *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
