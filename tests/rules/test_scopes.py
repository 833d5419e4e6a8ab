"""Values and words of the scopes of rules, as they are documented."""

from __future__ import annotations

import pytest

from gpumond.engine import EngineState, advance
from gpumond.engine.attribution import attribute
from gpumond.model.frame import Verdict
from gpumond.model.snapshot import Snapshot
from gpumond.rules import Rule, Scope
from gpumond.rules.built_in import BUILT_IN
from gpumond.rules.schema import LABELS, PLACEHOLDERS, VALUES
from gpumond.rules.scopes import RuleContext, subjects
from gpumond.rules.verdicts import active_verdicts
from gpumond.rules.window import RuleWindow, remember
from gpumond.testing import GIB, make_device, make_pool, make_process, make_report, make_snapshot

SNAPSHOT = make_snapshot(
    make_device(used_bytes=40 * GIB, processes=(make_process(42, 30 * GIB),)),
    reports=(make_report(42, (make_pool(live=GIB, cached=GIB),)),),
)
LEAK = Verdict(
    device_uuid="GPU-a",
    pid=42,
    start_ticks=100,
    kind="leak",
    since=0.0,
    evidence=(("slope_bytes_per_second", 5.0),),
    time_to_oom_seconds=90.0,
    summary="it grows",
)
SEEN = RuleContext(SNAPSHOT, attribute(SNAPSHOT), remember(RuleWindow(), SNAPSHOT), active_verdicts([LEAK]))


@pytest.mark.parametrize("scope", VALUES)
def test_documented_values_and_words_exist_for_each_row(scope: Scope):
    seen = subjects(scope, SEEN)
    assert seen.rows
    assert seen.values.keys() == VALUES[scope].keys()
    for row in seen.rows:
        known = [value_of(row) for value_of in seen.values.values()]
        assert all(value is None or value >= 0 for value in known)
        assert {name for name, _ in seen.labels(row)} | {"workload"} == LABELS[scope].keys() | {"workload"}
        assert seen.texts(row).keys() | {"value", "level"} == PLACEHOLDERS[scope].keys()


@pytest.mark.parametrize(
    ("frameworks", "name"),
    [
        (("torch 2.13.0",), "PYTORCH_ALLOC_CONF"),
        (("cupy 14.2.0", "torch 2.11.0+cu130"), "PYTORCH_ALLOC_CONF"),
        (("torch 3.0",), "PYTORCH_ALLOC_CONF"),
        (("torch 2.9.1",), "PYTORCH_CUDA_ALLOC_CONF"),
        (("torch 1.13.1",), "PYTORCH_CUDA_ALLOC_CONF"),
        (("torch nightly", "rmm 26.10"), "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_advice_on_fragmentation_names_the_variable_of_the_programs_pytorch_version(
    frameworks: tuple[str, ...], name: str
):
    rule = next(rule for rule in BUILT_IN if rule.name == "fragmentation")
    report = make_report(42, (make_pool(live=GIB, cached=GIB),), frameworks=frameworks)
    snapshot = make_snapshot(make_device(used_bytes=40 * GIB), reports=(report,))
    seen = subjects(
        "pool", RuleContext(snapshot, attribute(snapshot), remember(RuleWindow(), snapshot), active_verdicts([]))
    )
    words = {**seen.texts(seen.rows[0]), "value": "", "level": ""}
    assert f"set {name}=expandable_segments:True for torch" in dict(rule.annotations)["summary"].format(**words)


def test_verdict_is_a_value_of_its_process_and_its_device():
    for scope, pids in (("process", ("42", "")), ("device", ("",))):
        seen = subjects(scope, SEEN)  # type: ignore[arg-type]
        leaks = {dict(seen.labels(row)).get("pid", ""): seen.values["leak_bytes_per_second"](row) for row in seen.rows}
        assert leaks == dict(zip(pids, (5.0, 0.0) if scope == "process" else (5.0,), strict=True))


def advanced(*ticks: Snapshot) -> RuleContext:
    recent = RuleWindow()
    for snapshot in ticks:
        recent = remember(recent, snapshot)
    return RuleContext(ticks[-1], attribute(ticks[-1]), recent)


def test_agent_of_an_unlisted_process_does_not_make_cache_waste():
    device = make_device(used_bytes=40 * GIB, processes=(make_process(42, 30 * GIB), make_process(43, 9 * GIB)))
    own = make_report(42, (make_pool(live=GIB, cached=20 * GIB, ooms=0),))

    def wasted(pid: int) -> float | None:
        ticks = [
            make_snapshot(device, elapsed_seconds=at, reports=(own, make_report(pid, (make_pool(ooms=count),), uid=66)))
            for at, count in ((1.0, 0), (2.0, 1))
        ]
        seen = subjects("device", advanced(*ticks))
        return seen.values["wasted_ratio"](seen.rows[0])

    assert wasted(43) == 20 / 80
    assert wasted(66) == 0


def test_workloads_of_two_users_are_separate_with_any_names():
    own = make_report(42, (make_pool(live=GIB, cached=GIB),), uid=1000)
    other = make_report(66, (make_pool(live=50 * GIB),), uid=66)
    rules = (
        Rule(name="above", scope="workload", value="live_bytes", above=2 * GIB, match=(("uid", "1000"),)),
        Rule(name="below", scope="workload", value="live_bytes", below=2 * GIB),
    )
    first = advance(EngineState(), rules, make_snapshot(make_device(), reports=(own, other)))
    assert [dict(alert.labels)["uid"] for alert in first.frame.alerts] == ["1000"]
    silent = make_device(processes=(make_process(66),))
    second = advance(first.memory, rules, make_snapshot(silent, elapsed_seconds=2.0, reports=(own,)))
    assert [alert.value for alert in second.frame.alerts] == [float(GIB)]
    third = advance(second.memory, rules, make_snapshot(silent, elapsed_seconds=3.0))
    assert third.frame.alerts == ()
