"""Work in stretches: what comes of it, and that others have their turn between them."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpumond.daemon.slices import SLICE_SECONDS, in_slices
from gpumond.model.cooperative import Steps, run_to_end


def counting(stretches: int, seconds: float = 0.0) -> Steps[int]:
    for _ in range(stretches):
        time.sleep(seconds)
        yield
    return stretches


def failing() -> Steps[int]:
    yield
    raise ValueError("in the second stretch")


def others_turns(work: Steps[int]) -> int:
    """How often somebody else had a turn before the work was done."""

    async def run() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        assert await in_slices(work) == 5
        task.cancel()
        return turns

    return asyncio.run(run())


def test_what_comes_of_it_is_the_same_at_once_and_in_slices():
    assert run_to_end(counting(5)) == asyncio.run(in_slices(counting(5))) == 5


def test_between_long_stretches_others_have_their_turn():
    assert others_turns(counting(5, 2 * SLICE_SECONDS)) == 5


def test_what_fails_fails_for_who_asked():
    with pytest.raises(ValueError, match="second stretch"):
        run_to_end(failing())
    with pytest.raises(ValueError, match="second stretch"):
        asyncio.run(in_slices(failing()))
