"""The parts of the overhead of a process."""

from __future__ import annotations

from gpumond.facts.snapshot import Reading, Snapshot, SourceState
from gpumond.tick.ledger import overhead_parts
from gpumond.tick.observe import observe
from tests.helpers.values import make_device, make_pool, make_process, make_report

UP = SourceState(name="nvml", up=True, responsive=True)
MIB = 1 << 20

Second = tuple[int | None, int, tuple[str, ...]]
"""The driver's count, held bytes, both in MiB, and the components that the agent states."""


def after(seconds: list[Second]) -> Snapshot:
    snapshot = None
    for second, (count, held, components) in enumerate(seconds):
        processes = () if count is None else (make_process(10, count * MIB),)
        device = make_device(used_bytes=(count or 0) * MIB, processes=processes)
        pools = (make_pool(live=held * MIB),) if held else ()
        report = make_report(pools=pools, components=components)
        reading = Reading(devices=(device,))
        snapshot = observe(snapshot, UP, reading, (report,), taken_at=float(second), elapsed_seconds=float(second))
    assert snapshot is not None
    return snapshot


def parts_after(seconds: list[Second]) -> dict[str, int] | None:
    snapshot = after(seconds)
    count, held, _ = seconds[-1]
    overhead = snapshot.overheads_by_process.get(("GPU-a", snapshot.reports[0].key))
    found = overhead_parts(overhead, None if count is None else (count - held) * MIB)
    return None if found is None else {name: size // MIB for name, size in found}


FRESH: list[Second] = [(None, 0, ()), (None, 0, ()), (400, 0, ()), (500, 0, ()), (500, 0, ())]
NCCL: Second = (2500, 700, ("nccl",))


def test_first_value_at_rest_of_a_fresh_program_is_its_context():
    assert parts_after(FRESH[:4]) is None
    assert parts_after(FRESH) == {"context": 500, "other": 0}
    moving: list[Second] = [(700, 100, ()), (900, 400, ()), (1200, 700, ()), (1200, 700, ())]
    assert parts_after(FRESH[:2] + moving) == {"context": 500, "other": 0}


def test_growth_at_the_first_sight_of_a_component_came_with_it():
    seconds = [*FRESH, *[(1200, 700, ())] * 2, (1800, 700, ("nccl",)), *[(2500, 700, ("nccl",))] * 3]
    assert parts_after(seconds) == {"context": 500, "with NCCL": 1300, "other": 0}
    seconds += [(2700, 700, ("nccl",))] * 3
    assert parts_after(seconds) == {"context": 500, "with NCCL": 1300, "other": 200}
    seconds += [(2900, 700, ("nccl", "graphs", "triton", "later"))] * 4
    expected = {"context": 500, "with NCCL": 1300, "with CUDA graphs and Triton kernels": 200, "other": 200}
    assert parts_after(seconds) == expected


def test_parts_of_a_program_whose_agent_came_later_are_unknown():
    assert parts_after([(500, 0, ())] * 6) is None
    assert parts_after([*FRESH[:2], *((500 + 20 * i, 0, ()) for i in range(40)), *[(900, 0, ())] * 3]) is None


def test_parts_that_exceed_the_overhead_are_unknown():
    assert parts_after([*FRESH, *[(900, 500, ())] * 3]) is None


def test_value_of_a_component_waits_until_count_and_pools_rest():
    seconds = [*FRESH, *((600 + 300 * i, 100 + 200 * i, ("nccl",)) for i in range(5))]
    assert parts_after(seconds) == {"context": 500, "other": 400}
    assert parts_after([*seconds, seconds[-1]]) == {"context": 500, "with NCCL": 400, "other": 0}
