"""Exposition: names, documentation, golden text."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumond import __version__, revision
from gpumond.facts.frame import Frame, Verdict
from gpumond.facts.pools import Exactness, HostPool, PoolUsage, Receipt, Reclaimable
from gpumond.facts.program import PoolLimit
from gpumond.facts.snapshot import AgentReport, Fault, Reading, SourceState
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.metrics.catalog import FAMILIES, MAX_PROCESSES_PER_DEVICE, Family
from gpumond.metrics.exposition import Exposition, ScrapeFormat
from gpumond.metrics.telemetry import Telemetry
from gpumond.serve.examples import RECEIPT, REPORT, SNAPSHOT
from gpumond.tick.observe import observe
from tests.helpers.agents import GIB
from tests.helpers.values import (
    TickState,
    advance,
    make_device,
    make_fault,
    make_pool,
    make_process,
    make_quotas,
    make_report,
    make_snapshot,
)
from tools.docs.metrics import document

GOLDEN = Path(__file__).with_name("golden.txt")
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
FORBIDDEN_LABELS = {"job", "instance", "hostname", "host", "node", "pod", "namespace", "type"}


def page(frame: Frame | None, telemetry: Telemetry | None = None, accept: str = "") -> str:
    return Exposition(telemetry or Telemetry()).scrape(frame, ScrapeFormat.of(accept)).body.decode()


def full_frame() -> Frame:
    """Return a frame with values of every kind."""
    frame = advance(TickState(), BUILT_IN, SNAPSHOT).frame
    uuid = SNAPSHOT.devices[0].uuid
    leak = Verdict(
        device_uuid=uuid,
        pid=4242,
        start_ticks=100,
        kind="leak",
        since=1.0,
        evidence=(("slope", 1.0),),
        time_to_full_seconds=3840.0,
    )
    report = replace(REPORT, limits=(PoolLimit("torch", uuid, 40 * GIB, "training"),))
    quotas = make_quotas(report, (30 * GIB, "training"), (40 * GIB, "training"), (90 * GIB, "training"))
    return Frame(replace(frame.snapshot, reports=(report,), quotas=quotas), frame.ledger, (leak,), frame.alerts)


def busy_telemetry(receipt: Receipt) -> Telemetry:
    telemetry = Telemetry()
    telemetry.count_rejection("oversize")
    telemetry.count_faults([Fault("nvml", "timeout", None, "")])
    telemetry.add_receipt(receipt)
    return telemetry


def names(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_text_equals_the_golden_file():
    """Dashboards rely on this text. Regenerate it with `python -m tests.metrics.test_metrics`."""
    assert page(full_frame()).partition("# HELP gpumond_flushes_total")[0] == GOLDEN.read_text()


def test_documentation_is_current():
    assert DOCUMENT.read_text() == document(), "run `make docs`"


def test_exported_and_documented_names_are_equal():
    text = page(full_frame())
    documented = set(re.findall(r"^\| `(\w+)`", document(), re.MULTILINE))
    assert {name.removesuffix("_created") for name in names(text)} == documented


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_and_labels_follow_the_conventions(family: Family):
    assert re.fullmatch(r"gpumond_[a-z][a-z0-9_]*", family.name)
    assert (family.kind == "counter") == family.name.endswith("_total")
    assert not FORBIDDEN_LABELS & set(family.labels)
    assert len(family.labels) <= 14
    for abbreviation in ("_mib", "_mb", "_gb", "_percent", "_mhz", "_ms", "_milliseconds", "_kb"):
        assert abbreviation not in family.name


def test_both_formats_have_the_same_values():
    text, newer = page(full_frame()), page(full_frame(), accept="application/openmetrics-text")
    of_text = {(s.name, frozenset(s.labels.items()), s.value) for f in parse_text(text) for s in f.samples}
    of_newer = {(s.name, frozenset(s.labels.items()), s.value) for f in parse_openmetrics(newer) for s in f.samples}
    assert of_text == of_newer


def test_build_info_states_version_and_commit():
    (sample,) = [
        sample
        for family in parse_text(page(full_frame()))
        for sample in family.samples
        if sample.name == "gpumond_build_info"
    ]
    assert (sample.labels["version"], sample.labels["revision"]) == (__version__, revision())


@pytest.mark.needs("promtool")
def test_promtool_has_no_complaint():
    receipt_text = page(full_frame(), busy_telemetry(RECEIPT))
    checked = subprocess.run(["promtool", "check", "metrics"], input=receipt_text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_unknown_value_is_absent():
    text = page(
        advance(TickState(), (), make_snapshot(make_device(size_bytes=None, used_bytes=None, processes=None))).frame
    )
    assert "gpumond_device_memory_used_bytes{" not in text
    assert "gpumond_device_power_watts{" not in text
    assert 'gpumond_device_up{gpu="0",uuid="GPU-a"} 1.0' in text


def test_removed_device_has_no_series():
    exposition = Exposition(Telemetry())
    up = SourceState(name="sim", up=True, responsive=True)
    first = observe(None, up, Reading(devices=(make_device("GPU-a"), make_device("GPU-b"))), (), 1.0, 1.0)
    second = observe(first, up, Reading(devices=(make_device("GPU-b"),)), (), 2.0, 2.0)
    assert b"GPU-a" in exposition.scrape(advance(TickState(), (), first).frame, ScrapeFormat(False)).body
    assert b"GPU-a" not in exposition.scrape(advance(TickState(), (), second).frame, ScrapeFormat(False)).body


def test_frame_is_rendered_once():
    exposition, frame = Exposition(Telemetry()), full_frame()
    assert exposition.scrape(frame, ScrapeFormat(False)) is exposition.scrape(frame, ScrapeFormat(False))


def test_processes_beyond_the_cap_are_summed():
    count = MAX_PROCESSES_PER_DEVICE + 30
    device = make_device(
        used_bytes=count * GIB, processes=tuple(make_process(pid, GIB + pid) for pid in range(1, count + 1))
    )
    text = page(advance(TickState(), (), make_snapshot(device)).frame)
    shown = re.findall(r'gpumond_process_memory_used_bytes\{gpu="0",pid="(\w+)",uuid="GPU-a"\} (\S+)', text)
    assert len(shown) == MAX_PROCESSES_PER_DEVICE + 1
    assert float(dict(shown)["other"]) == sum(GIB + pid for pid in range(1, 31))


def test_series_of_a_user_above_its_share_cost_no_other_user():
    own = make_report(10, (make_pool(live=GIB), make_pool(allocator="cupy", live=GIB)), uid=1, workload="own")
    many = tuple(
        make_report(pid, tuple(make_pool(allocator=f"a{n}", live=1) for n in range(30)), uid=2, workload=f"w{pid}")
        for pid in range(11, 31)
    )
    device = make_device(used_bytes=3 * GIB)
    alone = replace(advance(TickState(), (), make_snapshot(device, reports=(own,))).frame, owners={})
    together = replace(advance(TickState(), (), make_snapshot(device, reports=(*many, own))).frame, owners={})
    exposition = Exposition(Telemetry(), max_series=500)
    wanted = [line for line in page(alone).splitlines() if 'pid="10"' in line or 'workload="own"' in line]
    assert len(wanted) > 15
    for frame in (together, replace(together)):
        lines = exposition.scrape(frame, ScrapeFormat(False)).body.decode().splitlines()
        assert set(wanted) <= set(lines)
        frames = [line for line in lines if line.startswith("gpumond_") and 'pid="' in line]
        assert 350 < len(frames) <= 500
    assert [line for line in lines if line.startswith("gpumond_series_dropped_total")] == [
        "gpumond_series_dropped_total 5432.0"
    ]


def test_process_has_the_rank_and_job_that_its_agent_reports():
    device = make_device(used_bytes=2 * GIB, processes=(make_process(10), make_process(11)))
    report = make_report(10, rank=3, world_size=8, job="slurm/4711")
    text = page(advance(TickState(), (), make_snapshot(device, reports=(report,))).frame)
    (info,) = [family for family in parse_text(text) if family.name == "gpumond_process_info"]
    names = ("rank", "world_size", "job_id")
    found = {sample.labels["pid"]: tuple(sample.labels[name] for name in names) for sample in info.samples}
    assert found == {"10": ("3", "8", "slurm/4711"), "11": ("", "", "")}


def test_page_limits_series_and_counts_dropped_ones():
    frame = full_frame()
    everything = page(frame)
    telemetry = Telemetry()
    capped = Exposition(telemetry, max_series=10).scrape(frame, ScrapeFormat(False)).body.decode()
    names = [sample.name for family in parse_text(capped) for sample in family.samples]
    ours = [name for name in names if f"\n{name}" in everything.partition("# HELP gpumond_flushes_total")[0]]
    assert len(ours) == 10
    assert float(re.search(r"^gpumond_series_dropped_total (\S+)$", capped, re.MULTILINE)[1]) > 0  # type: ignore[index]
    assert "gpumond_series_dropped_total 0.0" in everything


def test_label_values_are_escaped():
    device = make_device(name='x"}\n# TYPE evil gauge\nevil 1\\', used_bytes=0)
    text = page(advance(TickState(), (), make_snapshot(device)).frame)
    families = {family.name for family in parse_text(text)}
    assert "evil" not in families


if __name__ == "__main__":
    GOLDEN.write_text(page(full_frame()).partition("# HELP gpumond_flushes_total")[0])


def count(telemetry: Telemetry, fault: Fault) -> float | None:
    return telemetry.registry.get_sample_value("gpumond_faults_total", {"source": fault.source, "kind": fault.kind})


def test_lasting_fault_counts_once_and_a_returning_one_again():
    telemetry, hidden = Telemetry(), make_fault("AMD-a", "processes_hidden", "drm")
    for standing in ([hidden], [hidden], [], [hidden]):
        telemetry.count_faults(standing)
    assert count(telemetry, hidden) == 2


def test_faults_are_counted_for_each_device():
    telemetry = Telemetry()
    telemetry.count_faults([make_fault("GPU-a"), make_fault("GPU-b")])
    telemetry.count_faults([make_fault("GPU-a"), make_fault("GPU-b"), make_fault("GPU-c")])
    assert count(telemetry, make_fault()) == 3


def test_missing_reading_ends_no_fault():
    telemetry = Telemetry()
    telemetry.count_faults([make_fault("GPU-a")])
    telemetry.count_faults([], is_complete=False)
    telemetry.count_faults([make_fault("GPU-a")])
    assert count(telemetry, make_fault()) == 1


def series(*pools: PoolUsage, host_pools: tuple[HostPool, ...] = ()) -> dict[str, str]:
    """Return the values of the pool series by name."""
    report = AgentReport(
        pid=4242,
        start_ticks=1,
        uid=0,
        workload="train",
        age_seconds=0.0,
        frameworks=(),
        flush_policy="allow",
        pools=pools,
        host_pools=host_pools,
    )
    frame = advance(TickState(), (), make_snapshot(make_device(uuid="GPU-a"), reports=(report,))).frame
    page = Exposition(Telemetry()).scrape(frame, ScrapeFormat(False)).body.decode()
    return dict(re.findall(r"^gpumond_((?:host_)?pool_\w+)\{.*\} (\S+)$", page, re.MULTILINE))


def pool_with(exactness: Exactness, held_known: bool) -> PoolUsage:
    return PoolUsage(
        allocator="rmm",
        device_uuid="GPU-a",
        live_bytes=50,
        held_bytes=50,
        reclaimable=Reclaimable(0, 0, 0, exactness),
        stranded_bytes=0,
        held_known=held_known,
    )


@pytest.mark.parametrize(
    ("exactness", "held_known", "shown"),
    [
        ("exact", True, {"pool_held_bytes", "pool_stranded_bytes", "pool_reclaimable_bytes"}),
        ("not_releasable", False, {"pool_reclaimable_bytes"}),
        ("interval", False, set()),
    ],
)
def test_unknown_values_have_no_series(exactness: Exactness, held_known: bool, shown: set[str]) -> None:
    known = series(pool_with(exactness, held_known))
    assert known.keys() - {"pool_live_bytes", "pool_refilled_flushes_total"} == shown
    assert known["pool_live_bytes"] == "50"


def test_unknown_live_bytes_have_no_series_and_nothing_that_follows_from_them() -> None:
    unknown = series(replace(pool_with("interval", True), live_bytes=None))
    assert unknown.keys() - {"pool_refilled_flushes_total"} == {"pool_held_bytes"}
    arena = series(replace(pool_with("not_releasable", True), live_bytes=None))
    assert arena.keys() - {"pool_refilled_flushes_total"} == {"pool_held_bytes", "pool_reclaimable_bytes"}


def test_pinned_host_memory_is_in_no_series_of_a_device() -> None:
    assert series(host_pools=(HostPool("torch", 64, 96),)) == {
        "host_pool_live_bytes": "64",
        "host_pool_held_bytes": "96",
    }


def test_unmapped_bytes_have_a_series_where_they_are_known() -> None:
    sleeping = replace(pool_with("exact", True), unmapped_bytes=7)
    assert series(sleeping)["pool_unmapped_bytes"] == "7"
    assert series(replace(sleeping, unmapped_bytes=0))["pool_unmapped_bytes"] == "0"


def test_live_allocations_have_a_series_where_they_are_counted() -> None:
    counted = replace(pool_with("exact", True), live_allocations=7)
    assert series(counted)["pool_live_allocations"] == "7"
    assert series(replace(counted, live_allocations=0))["pool_live_allocations"] == "0"
