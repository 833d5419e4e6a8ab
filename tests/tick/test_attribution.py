from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gpumond.facts.frame import Ledger
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_fault, make_pool, make_process, make_report, make_snapshot


def shares(ledger: Ledger, device_uuid: str = "GPU-a") -> Counter[str]:
    total: Counter[str] = Counter()
    for line in ledger.lines:
        if line.device_uuid == device_uuid:
            total[line.share] += line.used_bytes
    return +total


def overcount(ledger: Ledger, device_uuid: str = "GPU-a") -> int:
    return {entry.device_uuid: entry.overcount_bytes for entry in ledger.overcounts}[device_uuid]


def test_process_with_an_agent_has_shares_and_overhead():
    device = make_device(used_bytes=10 * GIB, processes=(make_process(used_bytes=9 * GIB),))
    report = make_report(pools=(make_pool(live=4 * GIB, cached=3 * GIB, stranded=GIB),))
    assert shares(make_ledger(make_snapshot(device, reports=(report,)))) == {
        "live": 4 * GIB,
        "cached": 3 * GIB,
        "stranded": GIB,
        "overhead": GIB,
        "unattributed": GIB,
    }


def test_process_without_an_agent_is_opaque():
    device = make_device(used_bytes=GIB, processes=(make_process(used_bytes=GIB),))
    assert shares(make_ledger(make_snapshot(device))) == {"opaque": GIB}


def test_process_whose_agent_has_no_pool_is_opaque():
    device = make_device(used_bytes=GIB, processes=(make_process(used_bytes=GIB),))
    ledger = make_ledger(make_snapshot(device, reports=(make_report(),)))
    assert shares(ledger) == {"opaque": GIB}
    assert {line.workload for line in ledger.lines if line.share == "opaque"} == {"train"}


def test_pool_with_unknown_live_bytes_is_opaque_beside_the_overhead():
    device = make_device(used_bytes=7 * GIB, processes=(make_process(used_bytes=6 * GIB),))
    uncounted = make_pool(allocator="rmm", live_bytes=None, held_bytes=4 * GIB)
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=(uncounted,)),)))
    assert [(line.share, line.used_bytes) for line in ledger.lines if line.process] == [
        ("opaque", 4 * GIB),
        ("overhead", 2 * GIB),
    ]
    counted = make_pool(live=GIB, cached=GIB // 2)
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=(uncounted, counted)),)))
    assert shares(ledger) == {
        "live": GIB,
        "cached": GIB // 2,
        "opaque": 4 * GIB,
        "overhead": GIB // 2,
        "unattributed": GIB,
    }


def test_pool_of_unknown_size_leaves_no_overhead():
    device = make_device(used_bytes=6 * GIB, processes=(make_process(used_bytes=6 * GIB),))
    pools = make_pool(allocator="rmm", live_bytes=None, held_known=False), make_pool(live=GIB)
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=pools),)))
    assert shares(ledger) == {"live": GIB, "opaque": 5 * GIB}
    assert "overhead" not in {line.share for line in ledger.lines}


def test_reused_pid_is_another_process():
    device = make_device(used_bytes=GIB, processes=(make_process(start_ticks=999, used_bytes=GIB),))
    ledger = make_ledger(make_snapshot(device, reports=(make_report(start_ticks=100, pools=(make_pool(live=GIB),)),)))
    assert shares(ledger) == {"opaque": GIB}
    assert {line.workload for line in ledger.lines} == {""}
    assert overcount(ledger) == 0


def test_allocators_of_one_process_are_summed():
    device = make_device(used_bytes=6 * GIB, processes=(make_process(used_bytes=6 * GIB),))
    pools = (make_pool(live=GIB, cached=GIB), make_pool(allocator="cupy", live=2 * GIB, stranded=GIB))
    assert shares(make_ledger(make_snapshot(device, reports=(make_report(pools=pools),)))) == {
        "live": 3 * GIB,
        "cached": GIB,
        "stranded": GIB,
        "overhead": GIB,
    }


def test_pool_inside_another_is_not_counted_twice():
    device = make_device(used_bytes=4 * GIB, processes=(make_process(used_bytes=4 * GIB),))
    pools = (
        make_pool(allocator="rmm", live=3 * GIB, cached=GIB),
        make_pool(allocator="cupy", inside="rmm", live=2 * GIB, cached=GIB),
    )
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=pools),)))
    assert shares(ledger) == {"live": 3 * GIB, "cached": GIB}
    assert overcount(ledger) == 0


def test_pool_inside_an_unreported_one_is_counted():
    device = make_device(used_bytes=GIB, processes=(make_process(used_bytes=GIB),))
    pools = (make_pool(allocator="cupy", inside="rmm", live=GIB),)
    assert shares(make_ledger(make_snapshot(device, reports=(make_report(pools=pools),)))) == {"live": GIB}


def test_overcount_is_the_excess_of_an_agent_over_an_older_driver_count():
    device = make_device(used_bytes=5 * GIB, processes=(make_process(used_bytes=2 * GIB),))
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=(make_pool(live=2 * GIB, cached=GIB),)),)))
    assert shares(ledger) == {"live": 2 * GIB, "cached": GIB, "unattributed": 3 * GIB}
    assert overcount(ledger) == GIB


def test_live_bytes_never_exceed_the_drivers_count_of_the_process():
    device = make_device(used_bytes=5 * GIB, processes=(make_process(used_bytes=2 * GIB),))
    for live in (3 * GIB, 70 * GIB):
        ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=(make_pool(live=live),)),)))
        assert shares(ledger) == {"live": 2 * GIB, "unattributed": 3 * GIB}
        assert overcount(ledger) == 0


def test_unmapped_bytes_have_no_line():
    device = make_device(used_bytes=2 * GIB, processes=(make_process(used_bytes=2 * GIB),))
    report = make_report(pools=(make_pool(live=GIB, unmapped_bytes=60 * GIB),))
    assert shares(make_ledger(make_snapshot(device, reports=(report,)))) == {"live": GIB, "overhead": GIB}


def test_agents_are_the_only_source_without_a_process_list():
    device = make_device(used_bytes=5 * GIB, processes=None)
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=(make_pool(live=3 * GIB),)),)))
    assert shares(ledger) == {"live": 3 * GIB, "unattributed": 2 * GIB}


def test_unknown_used_bytes_make_no_unattributed_line():
    device = make_device(used_bytes=None, processes=(make_process(used_bytes=None),))
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=(make_pool(live=GIB),)),)))
    assert shares(ledger) == {"live": GIB}
    assert ledger.overcounts == ()


def test_mig_instances_and_their_parent_each_add_up():
    parent = make_device("GPU-a", used_bytes=4 * GIB, processes=(make_process(used_bytes=4 * GIB),))
    instance = make_device(
        "MIG-a", parent_uuid="GPU-a", used_bytes=4 * GIB, processes=(make_process(used_bytes=4 * GIB),)
    )
    ledger = make_ledger(
        make_snapshot(parent, instance, reports=(make_report(pools=(make_pool("MIG-a", live=3 * GIB),)),))
    )
    assert shares(ledger, "MIG-a") == shares(ledger, "GPU-a") == {"live": 3 * GIB, "overhead": GIB}


def test_claim_on_a_device_that_does_not_list_the_process_is_ignored():
    others = make_device("GPU-b", used_bytes=GIB, processes=(make_process(20, used_bytes=GIB),))
    for processes in ((make_process(used_bytes=GIB),), ()):
        device = make_device(used_bytes=60 * GIB, processes=processes)
        false = make_report(66, pools=(make_pool(live=59 * GIB), make_pool("GPU-b", cached=70 * GIB)))
        ledger = make_ledger(make_snapshot(device, others, reports=(false,)))
        assert ledger == make_ledger(make_snapshot(device, others))


@pytest.mark.parametrize(
    "fields",
    [
        {"private_pid_namespace": True},
        {"faults": (make_fault("GPU-a", "processes_hidden", "drm"),)},
    ],
)
def test_claim_of_a_hidden_process_counts_up_to_the_used_memory(fields: dict[str, Any]):
    device = make_device(used_bytes=10 * GIB, processes=(make_process(20, used_bytes=GIB),))
    for claimed, live in ((5 * GIB, 5 * GIB), (80 * GIB, 10 * GIB)):
        report = make_report(pools=(make_pool(live=claimed),))
        assert shares(make_ledger(make_snapshot(device, reports=(report,), **fields)))["live"] == live


def test_claim_behind_an_mps_server_or_on_an_instance_counts():
    server = make_process(20, used_bytes=GIB, comm="nvidia-cuda-mps-server")
    behind = make_device(used_bytes=10 * GIB, processes=(server,))
    assert (
        shares(make_ledger(make_snapshot(behind, reports=(make_report(pools=(make_pool(live=5 * GIB),)),))))["live"]
        == 5 * GIB
    )
    parent = make_device("GPU-a", used_bytes=4 * GIB, processes=(make_process(20, used_bytes=GIB),))
    instance = make_device("MIG-a", parent_uuid="GPU-a", used_bytes=4 * GIB, processes=())
    ledger = make_ledger(
        make_snapshot(parent, instance, reports=(make_report(pools=(make_pool("MIG-a", live=3 * GIB),)),))
    )
    assert shares(ledger, "MIG-a")["live"] == 3 * GIB


def test_pools_of_an_agent_are_limited_to_the_drivers_count():
    device = make_device(used_bytes=10 * GIB, processes=(make_process(used_bytes=9 * GIB),))
    eight = tuple(make_pool(allocator=f"a{number}", live=GIB, cached=79 * GIB) for number in range(8))
    ledger = make_ledger(make_snapshot(device, reports=(make_report(pools=eight),)))
    assert shares(ledger) == {"live": 8 * GIB, "cached": GIB, "unattributed": GIB}
    assert overcount(ledger) == 0


amounts = st.integers(0, 2**63 - 1) | st.integers(0, 4)
maybe = st.none() | amounts
ids = st.integers(1, 4)
uuids = st.sampled_from(["GPU-a", "GPU-b", "MIG-a", "GPU-unseen"])
processes = st.builds(make_process, pid=ids, used_bytes=maybe, start_ticks=st.none() | ids)
pools = st.builds(
    PoolUsage,
    allocator=st.sampled_from(["torch", "rmm", "cupy"]),
    device_uuid=uuids,
    live_bytes=maybe,
    held_bytes=amounts,
    held_known=st.booleans(),
    reclaimable=st.builds(Reclaimable, amounts, amounts, amounts),
    stranded_bytes=amounts,
    unmapped_bytes=maybe,
    inside=st.sampled_from([None, "torch", "rmm", "cupy"]),
)
reports = st.builds(make_report, pid=ids, start_ticks=ids, pools=st.lists(pools, max_size=4).map(tuple))


@given(st.data())
def test_lines_sum_to_used_plus_overcount_for_any_reports(data: st.DataObject):
    lists = st.none() | st.lists(processes, max_size=4, unique_by=lambda p: (p.pid, p.start_ticks)).map(tuple)
    devices = tuple(
        make_device(uuid, used_bytes=data.draw(maybe), processes=data.draw(lists), parent_uuid=parent)
        for uuid, parent in (("GPU-a", None), ("GPU-b", None), ("MIG-a", "GPU-a"))
    )
    ledger = make_ledger(make_snapshot(*devices, reports=tuple(data.draw(st.lists(reports, max_size=4)))))
    assert all(line.used_bytes >= 0 for line in ledger.lines)
    assert all(entry.overcount_bytes >= 0 for entry in ledger.overcounts)
    for device in devices:
        if device.used_bytes is not None:
            total = sum(line.used_bytes for line in ledger.lines if line.device_uuid == device.uuid)
            assert total == device.used_bytes + overcount(ledger, device.uuid)


def managed_pool(**fields: Any) -> PoolUsage:
    return make_pool(allocator="cupy", managed=True, **fields)


def test_managed_memory_of_a_program_has_no_unattributed_bytes():
    """A CuPy program with 4 GiB of malloc_managed, for which the driver counts its context of 520 MiB."""
    context, device_bytes = 520 << 20, (520 << 20) + 4 * GIB
    device = make_device(used_bytes=device_bytes, processes=(make_process(used_bytes=context),))
    report = make_report(pools=(managed_pool(live=3 * GIB, cached=GIB),))
    ledger = make_ledger(make_snapshot(device, reports=(report,)))
    assert shares(ledger) == {"live": 3 * GIB, "cached": GIB, "overhead": context}
    assert overcount(ledger) == 0


def test_managed_memory_is_attributed_as_far_as_used_bytes_have_no_other_owner():
    processes = (make_process(10, GIB), make_process(20, GIB), make_process(30, GIB))
    reports = (
        make_report(10, pools=(managed_pool(live=30 * GIB), make_pool(live=GIB // 2))),
        make_report(20, pools=(managed_pool(live=10 * GIB),)),
        make_report(40, pools=(managed_pool(live=90 * GIB),)),  # the driver does not list it: it has no context
    )
    device = make_device(used_bytes=7 * GIB, processes=processes)
    ledger = make_ledger(make_snapshot(device, reports=reports))
    live = {line.pid: line.used_bytes for line in ledger.lines if line.share == "live"}
    assert live == {10: 3 * GIB + GIB // 2, 20: GIB}
    assert shares(ledger) == {"live": 4 * GIB + GIB // 2, "overhead": GIB + GIB // 2, "opaque": GIB}
    assert overcount(ledger) == 0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=5),
    st.integers(0, 120),
)
def test_lines_with_managed_memory_sum_to_used_plus_overcount(programs: list[tuple[int, int, bool]], used: int):
    processes = tuple(make_process(10 + i, count) for i, (count, _, _) in enumerate(programs))
    reports = tuple(
        make_report(10 + i, pools=(make_pool(live=held, managed=managed),))
        for i, (_, held, managed) in enumerate(programs)
    )
    ledger = make_ledger(make_snapshot(make_device(used_bytes=used, processes=processes), reports=reports))
    assert sum(line.used_bytes for line in ledger.lines) == used + overcount(ledger)
    assert all(line.used_bytes >= 0 for line in ledger.lines)
    assert overcount(ledger) == max(0, sum(count for count, _, _ in programs) - used)
