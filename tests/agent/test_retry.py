"""``retry_on_oom``: flush, shrink the arguments and retry; memory held by the error is released first."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumond import agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, OutOfMemory


class Tensor:
    """Live memory that is freed with the last reference, as a framework's."""

    def __init__(self, allocator: CachingAllocator, size: int) -> None:
        weakref.finalize(self, allocator.free, allocator.malloc(size))


def halved(size: int) -> tuple[int]:
    return (size // 2,)


def test_arguments_shrink_until_the_call_fits(allocator: CachingAllocator):
    sizes: list[int] = []

    @agent.retry_on_oom(shrink=halved, attempts=4)
    def train(size: int) -> int:
        """Train."""
        sizes.append(size)
        allocator.free(allocator.malloc(size))
        return size

    assert (train(3000 * MIB), train.__name__, train.__doc__) == (750 * MIB, "train", "Train.")
    assert sizes == [3000 * MIB, 1500 * MIB, 750 * MIB]
    program = agent.program()
    assert (program.oom_retries, program.oom_recovered, [oom.number for oom in program.ooms]) == (2, 1, [1, 2])


def test_memory_of_a_failed_attempt_is_free_at_the_next(allocator: CachingAllocator):
    """The tensors are in frames of the traceback, one of them in a cycle with the error."""
    live_at_retry: list[int] = []

    def inner(size: int) -> Tensor:
        kept = Tensor(allocator, size)
        try:
            return Tensor(allocator, size)
        except OutOfMemory as error:
            cycle = [error, kept]
            raise ValueError("wrapped") from cycle[0]  # type: ignore[misc]

    def outer(size: int) -> Tensor:
        live_at_retry.append(allocator.usage().live_bytes)
        activations = Tensor(allocator, 100 * MIB)
        try:
            return inner(size)
        except ValueError as error:
            raise OutOfMemory(f"out of memory next to {activations}") from error

    result = agent.retry_on_oom(outer, shrink=halved)(800 * MIB)
    assert live_at_retry == [0, 0]
    assert allocator.usage().live_bytes == 400 * MIB
    del result


def test_stored_traceback_holds_no_memory(allocator: CachingAllocator):
    """A debugger, a notebook or a logger stores it."""
    kept: list[Any] = []

    def work(size: int) -> None:
        activations = Tensor(allocator, 100 * MIB)
        try:
            raise OutOfMemory(f"out of memory next to {activations}")
        except OutOfMemory as error:
            kept.append(error.__traceback__)
            if size > MIB:
                raise

    agent.retry_on_oom(work, shrink=halved)(2 * MIB)
    assert len(kept) == 2
    kept.pop()
    assert allocator.usage().live_bytes == 0


def test_cache_is_flushed_before_the_next_attempt(allocator: CachingAllocator):
    held: list[int] = []

    def work() -> None:
        held.append(allocator.usage().held_bytes)
        if len(held) == 1:
            allocator.free(allocator.malloc(400 * MIB))
            raise OutOfMemory("as another library would say")

    agent.retry_on_oom(work)()
    assert held == [0, 0]


class Cyclic:
    """Memory that only a garbage collection frees."""

    def __init__(self, allocator: CachingAllocator, size: int) -> None:
        self.tensor, self.itself = Tensor(allocator, size), self


@pytest.fixture
def no_automatic_collection(allocator: CachingAllocator) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()  # frees the rest before the allocator closes


@pytest.mark.usefixtures("no_automatic_collection")
@pytest.mark.parametrize(("attempts", "live"), [(2, [900, 0]), (3, [900, 900, 0])])
def test_garbage_is_collected_before_the_last_attempt(allocator: CachingAllocator, attempts: int, live: list[int]):
    live_at_retry: list[int] = []

    def work() -> None:
        live_at_retry.append(allocator.usage().live_bytes // MIB)
        allocator.free(allocator.malloc(500 * MIB))

    Cyclic(allocator, 900 * MIB)
    agent.retry_on_oom(work, attempts=attempts)()
    assert live_at_retry == live


@pytest.mark.usefixtures("no_automatic_collection")
def test_garbage_is_kept_without_gc(allocator: CachingAllocator):
    Cyclic(allocator, 900 * MIB)
    with pytest.raises(OutOfMemory):
        agent.retry_on_oom(allocator.malloc, gc=False)(500 * MIB)
    assert allocator.usage().live_bytes == 900 * MIB


@pytest.mark.usefixtures("no_automatic_collection")
@pytest.mark.parametrize(("collects", "held"), [(True, 0), (False, 900)])
def test_scope_that_flushes_collects_garbage_if_asked(allocator: CachingAllocator, collects: bool, held: int):
    with agent.scope("epoch", flush=True, gc=collects):
        Cyclic(allocator, 900 * MIB)
    assert allocator.usage().held_bytes // MIB == held


def test_last_error_is_raised_as_it_was(allocator: CachingAllocator):
    raised: list[OutOfMemory] = []

    @agent.retry_on_oom(attempts=3)
    def work() -> None:
        local = "a variable"  # noqa: F841
        try:
            allocator.malloc(2000 * MIB)
        except OutOfMemory as error:
            raised.append(error)
            raise

    with pytest.raises(OutOfMemory) as caught:
        work()
    assert len(raised) == 3
    assert caught.value is raised[-1]
    frames = list(traceback.walk_tb(caught.tb))
    assert frames[-1][0].f_code.co_name == "allocate"
    assert [frame.f_locals.get("local") for frame, _ in frames if frame.f_code.co_name == "work"] == ["a variable"]
    assert (agent.program().oom_retries, agent.program().oom_recovered) == (2, 0)


def test_retries_end_when_arguments_cannot_shrink(allocator: CachingAllocator):
    calls: list[int] = []

    allocator.malloc(100 * MIB)

    def smaller(size: int) -> tuple[int] | None:
        return (size // 2,) if size > 1500 * MIB else None

    def work(size: int) -> None:
        calls.append(size)
        allocator.malloc(size)

    with pytest.raises(OutOfMemory):
        agent.retry_on_oom(work, shrink=smaller, attempts=10)(4000 * MIB)
    assert calls == [4000 * MIB, 2000 * MIB, 1000 * MIB]
    assert agent.program().oom_retries == 2, "the third one didn't take place"


def test_the_record_is_of_the_error_not_of_what_shrink_has_freed(allocator: CachingAllocator):
    earlier = [allocator.malloc(300 * MIB) for _ in range(2)]

    def smaller(size: int) -> tuple[int]:
        allocator.free(earlier.pop())
        return (size,)

    agent.retry_on_oom(allocator.malloc, shrink=smaller)(700 * MIB)
    (oom,) = agent.program().ooms
    assert [(pool.live_bytes // MIB, pool.cached_bytes) for pool in oom.pools] == [(600, 0)]


def test_a_retry_that_a_report_has_counted_stays_counted(allocator: CachingAllocator):
    reported: list[int] = []

    def declined(size: int) -> None:
        reported.append(agent.program().oom_retries)

    for _ in range(2):
        with pytest.raises(OutOfMemory):
            agent.retry_on_oom(allocator.malloc, shrink=declined)(2000 * MIB)
    assert (reported, agent.program().oom_retries) == ([1, 2], 2)


def test_keyword_arguments_shrink_too(allocator: CachingAllocator):
    def work(name: str, *, batch: int, seed: int) -> tuple[str, int, int]:
        allocator.free(allocator.malloc(batch))
        return name, batch, seed

    def smaller(name: str, *, batch: int, seed: int) -> dict[str, Any]:
        return {"batch": batch // 2}

    assert agent.retry_on_oom(work, shrink=smaller)("n", batch=1600 * MIB, seed=3) == ("n", 800 * MIB, 3)


def test_coroutine_function_remains_one(allocator: CachingAllocator):
    @agent.retry_on_oom(shrink=halved)
    async def serve(size: int) -> int:
        await asyncio.sleep(0)
        allocator.free(allocator.malloc(size))
        return size

    assert asyncio.run(serve(1600 * MIB)) == 800 * MIB


@pytest.mark.parametrize("error", [ValueError("not memory"), MemoryError("the host's"), KeyboardInterrupt()])
def test_other_errors_are_raised_at_once(error: BaseException):
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        agent.retry_on_oom(work)()
    assert calls == [1]


def test_callers_exception_is_left_unchanged(allocator: CachingAllocator):
    def outside() -> None:
        precious = "the caller's"
        raise KeyError(precious)

    try:
        outside()
    except KeyError as error:
        with pytest.raises(OutOfMemory):
            agent.retry_on_oom(allocator.malloc)(2000 * MIB)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert frames[-1].f_locals == {"precious": "the caller's"}


def test_decorator_works_with_and_without_parentheses(allocator: CachingAllocator):
    @agent.retry_on_oom
    def bare(value: int) -> int:
        return value

    @agent.retry_on_oom()
    def called(value: int) -> int:
        return value

    assert (bare(1), called(2), agent.retry_on_oom(len)("abc")) == (1, 2, 3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: agent.retry_on_oom(3), "retry_on_oom: expected a function"),
        (lambda: agent.retry_on_oom(shrink=2), "retry_on_oom: shrink: expected"),
        (lambda: agent.retry_on_oom(attempts=2.5), "retry_on_oom: attempts: expected int"),
        (lambda: agent.retry_on_oom(attempts=True), "retry_on_oom: attempts: expected int"),
        (lambda: agent.retry_on_oom(gc=1), "retry_on_oom: gc: expected bool"),  # type: ignore[call-overload]
        (lambda: agent.scope("epoch", flush=True, gc=1), "scope: gc: expected bool"),  # type: ignore[arg-type]
        (lambda: agent.scope("epoch", gc=True), "scope: gc=True has no effect without flush=True"),
        (lambda: agent.retry_on_oom(attempts=0), "retry_on_oom: attempts must be at least 1"),
    ],
)
def test_wrong_arguments_of_retry_are_named(call: Callable[[], object], says: str):
    with pytest.raises((TypeError, ValueError), match=says):
        call()


def test_shrink_with_an_invalid_result_is_named(allocator: CachingAllocator):
    with pytest.raises(TypeError, match="shrink: expected a tuple"):
        agent.retry_on_oom(allocator.malloc, shrink=lambda size: size // 2)(2000 * MIB)  # type: ignore[arg-type, return-value]
