"""Limits of containers that quotas set in the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from gpumond.facts.quota import Quota, QuotaTable
from gpumond.facts.snapshot import CgroupLimit, CgroupLimitChange, Snapshot
from gpumond.features.quotas.cgroups import (
    MAX_OWN_LIMITS,
    RETRY_SECONDS,
    AppliedCgroupLimit,
    CgroupLimiter,
    due_changes,
)
from gpumond.features.quotas.command import cgroup_table
from gpumond.features.quotas.quotas import assign_quotas
from gpumond.features.quotas.settings import QuotaConfig
from gpumond.serve.examples import DEVICE, PROCESS, SNAPSHOT
from tests.helpers.frames import make_frame
from tests.helpers.memory_store import MemoryStore

INSIDE = replace(PROCESS, container="a1" * 32, container_name="jupyter-1", pod_namespace="ml")
CGROUP = "/system.slice/docker-a1.scope"
NAME = f"{DEVICE.uuid} {CGROUP}"


def team(limit: int | None = 40) -> tuple[Quota, ...]:
    return () if limit is None else (Quota(name="team", container="jupyter-*", cgroup_limit_bytes=limit),)


def snapshot(
    quotas: Iterable[Quota], present: int | None = None, soft: int | None = None, at: float = 0.0, process=INSIDE
) -> Snapshot:
    limit = CgroupLimit(cgroup=CGROUP, pids=(process.pid,), limit_bytes=present, guaranteed_bytes=soft)
    device = replace(DEVICE, processes=(process,), cgroup_limits=(limit,))
    found = assign_quotas(QuotaTable(tuple(quotas)), (device,), ())
    return replace(SNAPSHOT, devices=(device,), reports=(), quotas=found, elapsed_seconds=at)


def shown(snapshot: Snapshot) -> dict[str, Any]:
    return make_frame(*snapshot.devices, quotas=snapshot.quotas)


def changes(found: tuple[list, dict]) -> list[tuple[int | None, int | None, str]]:
    return [(each.change.limit_bytes, each.change.before_bytes, each.quota) for each in found[0]]


def test_limit_is_set_changed_and_removed_with_its_quota():
    found = due_changes(snapshot(team()), {})
    assert changes(found) == [(40, None, "team")]
    found = due_changes(snapshot(team(), present=40, at=1), found[1])
    assert changes(found) == []
    found = due_changes(snapshot(team(30), present=40, at=2), found[1])
    assert changes(found) == [(30, 40, "team")]
    found = due_changes(snapshot((), present=30, at=3), found[1])
    assert changes(found) == [(None, 30, "team")]
    assert due_changes(snapshot((), at=4), found[1]) == ([], {})


def test_limit_that_does_not_appear_is_set_again_later():
    _, own = due_changes(snapshot(team()), {})
    assert due_changes(snapshot(team(), at=RETRY_SECONDS - 1), own)[0] == []
    found = due_changes(snapshot(team(), at=RETRY_SECONDS), own)
    assert changes(found) == [(40, None, "team")]
    assert due_changes(snapshot(team(), at=3 * RETRY_SECONDS - 1), found[1])[0] == []


def test_failed_change_leaves_the_limit_the_daemons_own():
    own = {NAME: AppliedCgroupLimit(id=NAME, limit_bytes=30, before_bytes=40, quota="team")}
    assert changes(due_changes(snapshot(team(30), present=40, at=1), own)) == [(30, 40, "team")]


@pytest.mark.parametrize(("present", "soft"), [(50, None), (None, 5), (40, 5)])
def test_limit_of_another_owner_is_left_in_place(present: int | None, soft: int | None):
    assert due_changes(snapshot(team(), present, soft), {}) == ([], {})
    own = {NAME: AppliedCgroupLimit(id=NAME, limit_bytes=20, before_bytes=None, quota="team")}
    assert due_changes(snapshot(team(), present, soft), own) == ([], {})
    assert due_changes(snapshot((), present, soft), own) == ([], {})


def test_process_outside_of_a_container_is_not_limited():
    everything = (Quota(name="all", container="*", cgroup_limit_bytes=40),)
    assert due_changes(snapshot(everything, process=replace(PROCESS, container=None)), {}) == ([], {})
    assert changes(due_changes(snapshot(everything), {})) == [(40, None, "all")]


def test_limits_of_the_oldest_containers_are_forgotten():
    own = {
        str(n): AppliedCgroupLimit(id=str(n), limit_bytes=1, before_bytes=None, quota="team")
        for n in range(MAX_OWN_LIMITS)
    }
    _, after = due_changes(snapshot(team()), own)
    assert (len(after), "0" in after, NAME in after) == (MAX_OWN_LIMITS, False, True)


def test_limit_of_its_container_is_that_of_a_process_without_an_agent():
    assert snapshot((), present=40).limits == {(DEVICE.uuid, INSIDE.key): 40}


def test_limit_is_audited_before_it_is_set_and_known_after_a_restart():
    store, made = MemoryStore(), list[CgroupLimitChange]()

    def make(new: Iterable[CgroupLimitChange]) -> None:
        assert store.audited
        made.extend(new)

    async def run() -> None:
        first = CgroupLimiter(store, store.audit, make)
        first.execute(snapshot(team()))
        await asyncio.sleep(0.1)
        store.full = True
        second = CgroupLimiter(store, store.audit, make)
        await second.load()
        second.execute(snapshot(team(30), present=40))
        await asyncio.sleep(0.1)
        assert len(made) == 1
        store.full = False
        second.execute(snapshot(team(30), present=40, at=RETRY_SECONDS))
        await asyncio.sleep(0.1)
        await second.close()

    asyncio.run(run())
    assert [(each.limit_bytes, each.before_bytes) for each in made] == [(40, None), (30, 40)]
    assert [(actor, action) for actor, action, _ in store.audited] == [("quota:team", "cgroup.limit")] * 2


@pytest.mark.parametrize("match", [{"workload": "train"}, {"user": "ada", "container": "c"}])
def test_container_limit_matches_what_a_container_has(match: dict[str, str]):
    with pytest.raises(ValueError, match="match only on container or namespace"):
        QuotaConfig.model_validate({"name": "a", "match": match, "cgroup_limit": "1GiB"})


def test_limits_of_cgroups_are_shown_with_the_quota_that_requires_them():
    frame = shown(snapshot(team(40 << 30), present=40 << 30, soft=1 << 30))
    lines = cgroup_table(frame).splitlines()
    assert lines[0].split() == ["GPU", "USED", "GUARANTEED", "LIMIT", "QUOTA", "CGROUP"]
    assert lines[1].split() == ["0", "-", "1.0", "GiB", "40.0", "GiB", "team", CGROUP]
    other = shown(snapshot(team(40 << 30), present=8 << 30))
    assert cgroup_table(other).splitlines()[1].split()[-2] == "-"
    assert cgroup_table(shown(snapshot(team()))) == ""
