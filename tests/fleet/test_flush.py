"""Plans and flushes on several machines, with stand-ins of daemons."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

from gpumond.fleet import Machine, machine
from gpumond.fleet.connection import Access, Client
from gpumond.fleet.flush import FlushOptions, carry_out, plan
from gpumond.fleet.selection import Criteria, PlannedFlush
from gpumond.fleet.waves import ProcessResult
from gpumond.testing import GIB, make_device, make_pool, make_process, make_report
from tests.fleet.stubs import Answer, stub
from tests.top.frames import make_frame

CLIENT = Client(Access(trust=ssl.create_default_context()), 60.0)


def frame() -> dict[str, Any]:
    reports = (make_report(10, (make_pool(live=GIB, cached=GIB),), workload="train"),)
    return make_frame(make_device(used_bytes=2 * GIB, processes=(make_process(10, 2 * GIB),)), reports=reports)


def test_machine_that_does_not_answer_does_not_delay_the_others():
    with stub(lambda path, body: None) as silent, stub(lambda path, body: (200, frame())) as present:
        machines = [machine(silent.address, {"instance": "slow"})]
        machines += [machine(present.address, {"instance": f"node-{number}"}) for number in range(3)]
        read: list[None] = []

        def done() -> None:
            read.append(None)
            if len(read) == 3:  # the connection of the fourth ends when the others have been read
                silent.over.set()

        planned, missing = asyncio.run(plan(CLIENT, [(each, None) for each in machines], Criteria("train"), 4, done))
    assert [(each.machine.name, each.pid) for each in planned] == [(f"node-{number}", 10) for number in range(3)]
    assert [each.machine for each in missing] == ["slow"]


def answers(failing: set[int]) -> Any:
    """Return a daemon whose programs with these pids fail."""

    def answer(path: str, body: str) -> Answer:
        outcome = "failed" if json.loads(body)["target"]["pid"] in failing else "freed"
        numbers = {"released_bytes": 0, "driver_released_bytes": None, "duration_seconds": 0.1, "expected": None}
        return 200, {"receipts": [{"outcome": outcome, **numbers}]}

    return answer


def carried_out(failing: set[int], max_failures: int) -> list[ProcessResult]:
    with stub(answers(failing)) as served:
        own = Machine("a", f"http://{served.address}")
        waves = [[PlannedFlush(machine=own, pid=pid, start_ticks=1)] for pid in range(1, 5)]
        return asyncio.run(carry_out(CLIENT, waves, FlushOptions(max_failures=max_failures)))


def test_flushes_stop_after_the_number_of_failures():
    found = carried_out({1, 3}, 2)
    assert [(each.wave, each.result) for each in found] == [
        (1, "failed"),
        (2, "flushed"),
        (3, "failed"),
        (4, "skipped"),
    ]
    assert found[-1].reason == "the flushes stopped after 2 failed"
    assert [each.result for each in carried_out({1, 3}, 1)] == ["failed", "skipped", "skipped", "skipped"]
    assert [each.result for each in carried_out({1, 3}, 3)] == ["failed", "flushed", "failed", "flushed"]
