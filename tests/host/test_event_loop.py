"""Cooperative slices: their result, errors, and other tasks between them."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpumond.facts.cooperative import Steps, run_to_end
from gpumond.host.event_loop import SLICE_SECONDS, in_slices
from tests.helpers import virtual_time


def counting(slices: int, seconds: float = 0.0) -> Steps[int]:
    for _ in range(slices):
        time.sleep(seconds)
        yield
    return slices


def failing() -> Steps[int]:
    yield
    raise ValueError("in the second stretch")


def runs_of_another_task(work: Steps[int]) -> int:
    """Count the runs of another task until the work is done."""

    async def run() -> int:
        runs = 0

        async def other() -> None:
            nonlocal runs
            while True:
                runs += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        assert await in_slices(work) == 5
        task.cancel()
        return runs

    return asyncio.run(run())


def test_result_is_the_same_with_and_without_slices():
    assert run_to_end(counting(5)) == asyncio.run(in_slices(counting(5))) == 5


def test_other_tasks_run_between_slices():
    assert runs_of_another_task(counting(5, 2 * SLICE_SECONDS)) == 5


def test_error_is_raised_to_the_caller():
    with pytest.raises(ValueError, match="second stretch"):
        run_to_end(failing())
    with pytest.raises(ValueError, match="second stretch"):
        asyncio.run(in_slices(failing()))


def test_work_with_a_share_of_the_time_waits_for_the_rest():
    seconds = 2 * SLICE_SECONDS
    result, waited = virtual_time.run(in_slices(counting(5, seconds), share=0.5))
    assert result == 5
    assert waited >= 5 * seconds
    assert virtual_time.run(in_slices(counting(5, seconds))) == (5, 0.0)
