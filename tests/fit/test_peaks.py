"""Peaks of earlier runs, and the size that is derived from them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.facts.frame import Frame, Ledger
from gpumond.facts.snapshot import ProcessEnd, Snapshot
from gpumond.facts.units import GIB
from gpumond.features.fit.run_peaks import MAX_RUNS_OF_WORKLOAD, AutoNeed, PeaksPart, RunPeak, RunPeaks, upper_bound
from gpumond.features.quotas.admission_client import auto_need
from tests.helpers.frames import busy_frame, fake_daemon
from tests.helpers.memory_store import MemoryStore
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

RUN = RunPeak(id="1", uid=1000, workload="train", device_name="H100", world_size=1, peak_bytes=10 * GIB, ended_at=1.0)


def test_fewer_than_three_runs_give_no_size():
    assert upper_bound([GIB, GIB]) is None
    assert upper_bound([GIB, GIB, GIB]) == GIB


@pytest.mark.parametrize("count", [3, 5, 10, 20])
def test_the_next_run_exceeds_the_bound_in_at_most_one_of_twenty(count: int):
    random = Random(count)
    exceeded = 0
    for _ in range(2000):
        peaks = [int(random.gauss(40, 2) * GIB) for _ in range(count + 1)]
        exceeded += peaks[-1] > (upper_bound(peaks[:-1]) or 0)
    assert exceeded / 2000 <= 0.06


def test_other_users_devices_and_numbers_of_ranks_do_not_count():
    known = RunPeaks([replace(RUN, id=str(number)) for number in range(3)])
    for number, fields in enumerate(({"uid": 1001}, {"device_name": "A100"}, {"world_size": 8}, {"workload": "other"})):
        known.add(replace(RUN, id=f"other-{number}", peak_bytes=70 * GIB, **fields))  # type: ignore[arg-type]
    assert known.need("train", "H100", 1, 1000).need_bytes == 10 * GIB
    assert known.need("train", "H100", 1, None).runs == 4
    assert known.need("train", "H100", 8, 1000).need_bytes is None


def test_only_the_newest_runs_of_a_workload_are_kept():
    known = RunPeaks()
    removed = [id for number in range(MAX_RUNS_OF_WORKLOAD + 2) for id in known.add(replace(RUN, id=str(number)))]
    assert removed == ["0", "1"]


def snapshot(*pids: int, used: int = 0, peak: int = 0, **fields: Any) -> Snapshot:
    processes = tuple(make_process(pid, used) for pid in pids)
    reports = tuple(make_report(pid, (make_pool(live=used, peak_held_bytes=peak),)) for pid in pids)
    return make_snapshot(make_device(name="H100", processes=processes), reports=reports, **fields)


def followed(*snapshots: Snapshot) -> list[RunPeak]:
    """Return the runs that a daemon stores which sees these snapshots."""
    store, services = MemoryStore(), {}
    core: Any = SimpleNamespace(store=store, provide=services.__setitem__)

    async def follow() -> list[RunPeak]:
        part = PeaksPart(core)
        for each in snapshots:
            part.act(SimpleNamespace(frame=Frame(each, Ledger())))  # type: ignore[arg-type]
        await part.close()
        again = PeaksPart(core)
        await again.load()
        return list(services[RunPeaks]._runs.values())

    return asyncio.run(follow())


def test_a_run_is_stored_when_it_ends_with_the_peak_that_its_allocator_states():
    (run,) = followed(snapshot(10, used=5 * GIB, peak=8 * GIB), snapshot(10, used=2 * GIB, peak=3 * GIB), snapshot())
    assert (run.workload, run.device_name, run.peak_bytes) == ("train", "H100", 8 * GIB)


def test_a_run_that_ended_out_of_memory_needed_more_and_is_not_stored():
    end = ProcessEnd(10, 100, "out-of-memory")
    assert followed(snapshot(10, used=GIB), snapshot(ends=(end,))) == []


@pytest.mark.parametrize(
    ("need_bytes", "runs", "message"),
    [(None, 2, "requires three runs of train on H100, but 2 are known"), (5, 4, "")],
)
def test_auto_is_a_size_or_a_request_for_one(need_bytes: int | None, runs: int, message: str):
    answer = AutoNeed(
        workload="train", device_name="H100", world_size=1, runs=runs, need_bytes=need_bytes, largest_bytes=5
    )
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/need"] = (200, asdict(answer))
        if message:
            with pytest.raises(ConfigError, match=message):
                auto_need(fake.url, "train", None, 1)
        else:
            assert auto_need(fake.url, "train", "0", 1) == need_bytes
        assert fake.queries[-1][0].startswith("/api/v1/need?workload=train&world_size=1&uid=")


def test_auto_requires_a_workload():
    with pytest.raises(ConfigError, match="requires --workload"):
        auto_need("http://127.0.0.1:1", "", None, 1)
