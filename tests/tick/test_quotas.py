"""Quotas of processes, and the limits that are due in programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond.facts.program import AppliedLimit, PoolLimit
from gpumond.facts.quota import Quota, QuotaTable
from gpumond.facts.snapshot import AgentReport, Snapshot
from gpumond.features.quotas.quotas import (
    MAX_RETRY_SECONDS,
    RETRY_SECONDS,
    DueLimit,
    assign_quotas,
    due_limits,
    with_refusals,
)
from gpumond.serve.examples import DEVICE, PROCESS, REPORT, SNAPSHOT

RESEARCH = replace(PROCESS, user="research", container_name="jupyter", pod_namespace="ml", comm="python")
UUID = DEVICE.uuid
LIMITED = replace(REPORT, allows_limit=True)


def quota(name: str = "team", **fields: object) -> Quota:
    return Quota(**{"name": name, "workload": "*", "limit_bytes": 40} | fields)  # type: ignore[arg-type]


def snapshot(report: AgentReport, *quotas: Quota, at: float = 0.0) -> Snapshot:
    found = assign_quotas(QuotaTable(quotas), (DEVICE,), (report,))
    return replace(SNAPSHOT, reports=(report,), quotas=found, elapsed_seconds=at)


def with_limit(limit_bytes: int, quota: str = "") -> AgentReport:
    return replace(LIMITED, limits=(PoolLimit("torch", UUID, limit_bytes, quota),))


@pytest.mark.parametrize(
    ("patterns", "matches"),
    [
        ({"workload": "tr*"}, True),
        ({"workload": "serve"}, False),
        ({"user": "research"}, True),
        ({"user": "1000"}, True),
        ({"user": "a"}, False),
        ({"container": "jupyter*"}, True),
        ({"namespace": "ml"}, True),
        ({"namespace": "?"}, False),
        ({"workload": "train", "user": "grafana"}, False),
        ({"workload": "train", "user": "research"}, True),
    ],
)
def test_all_patterns_of_a_quota_match_a_process(patterns: dict[str, str], matches: bool):
    table = QuotaTable([Quota(name="team", soft_limit_bytes=1, **patterns)])
    device = replace(DEVICE, processes=(RESEARCH,))
    assert bool(assign_quotas(table, (device,), (REPORT,))) is matches


def test_process_without_agent_is_matched_by_its_command():
    device = replace(DEVICE, processes=(RESEARCH,))
    (found,) = assign_quotas(QuotaTable([quota(workload="python")]), (device,), ())
    assert (found.key, found.quota.limit_bytes) == (RESEARCH.key, 40)


def test_lowest_limits_and_highest_reserve_apply_with_the_names_of_their_quotas():
    first = quota("first", soft_limit_bytes=30, limit_bytes=40, reserve_bytes=5)
    second = quota("second", soft_limit_bytes=20, limit_bytes=50, reserve_bytes=9)
    (found,) = assign_quotas(QuotaTable([first, second]), (), (REPORT,))
    effective = found.quota
    assert (effective.soft_limit_bytes, effective.soft_limit_quota) == (20, "second")
    assert (effective.limit_bytes, effective.limit_quota) == (40, "first")
    assert (effective.reserve_bytes, effective.reserve_quota) == (9, "second")


def test_limit_is_due_once_and_again_later_if_the_program_does_not_report_it():
    due, sent = due_limits(snapshot(LIMITED, quota()), {})
    assert due == [DueLimit(LIMITED, 40, "team")]
    assert due_limits(snapshot(LIMITED, quota(), at=RETRY_SECONDS - 1), sent)[0] == []
    again, later = due_limits(snapshot(LIMITED, quota(), at=RETRY_SECONDS), sent)
    assert again == due
    assert due_limits(snapshot(LIMITED, quota(), at=2 * RETRY_SECONDS), later)[0] == []
    assert due_limits(snapshot(LIMITED, quota(), at=3 * RETRY_SECONDS), later)[0] == due
    at, waits = 0.0, []
    for _ in range(20):
        at = sent[LIMITED.key].again_at
        _, sent = due_limits(snapshot(LIMITED, quota(), at=at), sent)
        waits.append(sent[LIMITED.key].again_at - at)
    assert waits[-1] == MAX_RETRY_SECONDS
    assert waits == sorted(waits)


def test_allocator_that_cannot_be_limited_is_not_asked_again_until_the_pools_change():
    other = replace(REPORT.pools[0], allocator="jax")
    both = replace(LIMITED, pools=(*LIMITED.pools, other), limits=(PoolLimit("torch", UUID, 40, "team"),))
    _, sent = due_limits(snapshot(both, quota()), {})
    refusal = (AppliedLimit("torch", UUID, 40, True), AppliedLimit("jax", None, 40, False, "it cannot"))
    sent[both.key] = with_refusals(sent[both.key], refusal)
    later, sent = due_limits(snapshot(both, quota(), at=1000.0), sent)
    assert later == []
    raised = replace(both, limits=(PoolLimit("torch", UUID, 50),))
    assert due_limits(snapshot(raised, quota(), at=1001.0), sent)[0] != []
    more = replace(both, pools=(*both.pools, replace(other, device_uuid="GPU-b")))
    assert due_limits(snapshot(more, quota(), at=1001.0), sent)[0] != []


def test_limit_in_effect_is_not_sent_again():
    assert due_limits(snapshot(with_limit(40, "team"), quota()), {})[0] == []


@pytest.mark.parametrize(
    ("before", "due"),
    [
        (with_limit(50, "team"), True),  # the quota has changed
        (with_limit(30, "team"), True),
        (with_limit(40, "other"), True),
        (with_limit(50), True),  # the program has raised its limit
        (with_limit(30), False),  # the program or an administrator has set a lower one
        (replace(LIMITED, limits=(PoolLimit("cupy", UUID, 40, "team"),)), True),  # torch is used only now
        (replace(LIMITED, pools=()), False),
        (REPORT, False),  # the program does not allow a limit
    ],
)
def test_limit_is_due_where_it_differs(before: AgentReport, due: bool):
    assert bool(due_limits(snapshot(before, quota()), {})[0]) is due


def test_changed_quota_is_due_at_once():
    _, sent = due_limits(snapshot(LIMITED, quota()), {})
    due, _ = due_limits(snapshot(with_limit(40, "team"), quota(limit_bytes=30), at=1.0), sent)
    assert [each.limit_bytes for each in due] == [30]


def test_limit_of_a_removed_quota_is_removed_and_others_remain():
    """Also by a daemon that did not set it: the program reports the quota."""
    (removal,) = due_limits(snapshot(with_limit(40, "team")), {})[0]
    assert (removal.limit_bytes, removal.quota) == (None, "team")
    assert due_limits(snapshot(with_limit(40)), {})[0] == []


def test_programs_that_have_ended_are_forgotten():
    _, sent = due_limits(snapshot(LIMITED, quota()), {})
    assert due_limits(replace(SNAPSHOT, reports=()), sent) == ([], {})
