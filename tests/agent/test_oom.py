"""Out-of-memory errors of each library, and the snapshot that is kept of each."""

from __future__ import annotations

import threading

import pytest

from gpumond import agent
from gpumond.agent.measure.oom_record import OOMS, free_bytes, is_oom, raising_allocator, request_bytes
from gpumond.facts.program import MAX_OOMS as KEPT
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, OutOfMemory
from tests.helpers.simulated import UUID
from tests.helpers.values import make_pool


def an_error(module: str, name: str, text: str, base: type[Exception] = RuntimeError) -> Exception:
    """Create an error as a library raises it that is not installed here."""
    error: Exception = type(name, (base,), {"__module__": module})(text)
    return error


TORCH = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 78.00 GiB memory in use."
)
RMM = "std::bad_alloc: out_of_memory: CUDA error (failed to allocate 1073741824 bytes) at: cuda_memory_resource.hpp:62"
JAX = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes."


@pytest.mark.parametrize(
    ("error", "request_"),
    [
        (an_error("torch", "OutOfMemoryError", TORCH), int(20.5 * 1024 * MIB)),
        (an_error("torch.cuda", "OutOfMemoryError", TORCH), int(20.5 * 1024 * MIB)),
        (an_error("cupy.cuda.memory", "OutOfMemoryError", "Out of memory allocating 1,536 bytes", MemoryError), 1536),
        (MemoryError(RMM), 1 << 30),
        (an_error("jaxlib._jax", "XlaRuntimeError", JAX), 1 << 30),
        (an_error("jax.errors", "JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 1.00TiB."), 1 << 40),
        (an_error("tensorflow.python.framework.errors_impl", "ResourceExhaustedError", "OOM", Exception), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 MiB"), 2 * MIB),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (OutOfMemory("tried to allocate 500.00 MiB on GPU-x"), 500 * MIB),
    ],
)
def test_out_of_memory_errors_are_recognized_by_their_names(error: Exception, request_: int | None):
    assert is_oom(error)
    assert request_bytes(error) == request_


@pytest.mark.parametrize(
    ("error", "allocator", "free"),
    [
        (an_error("torch", "OutOfMemoryError", TORCH), "torch", 1 << 30),
        (an_error("cupy.cuda.memory", "OutOfMemoryError", "Out of memory allocating 1,536 bytes"), "cupy", None),
        (MemoryError(RMM), "rmm", None),
        (an_error("jaxlib._jax", "XlaRuntimeError", JAX), "jax", None),
        (OutOfMemory("tried to allocate 5.00 MiB on GPU-x: 9.00 MiB in total, 3.00 MiB free"), "sim", 3 * MIB),
        (MemoryError("of the host"), "", None),
    ],
)
def test_an_error_states_its_allocator_and_the_free_bytes(error: Exception, allocator: str, free: int | None):
    assert (raising_allocator(error), free_bytes(error)) == (allocator, free)


def test_an_error_states_the_maximum_size_of_a_pool(allocator: CachingAllocator):
    text = (
        "std::bad_alloc: out_of_memory: Maximum pool size exceeded (failed to allocate 23.894238 GiB): Not enough room "
        "to grow, current/max/try size = 1024.000000 MiB, 20.500000 GiB, 23.894238 GiB"
    )
    with pytest.raises(MemoryError), agent.scope("load"):
        raise MemoryError(text)
    (oom,) = agent.program().ooms
    assert (oom.allocator, oom.limit_bytes) == ("rmm", int(20.5 * (1 << 30)))


class ErrorWithoutText(RuntimeError):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),  # of the host
        MemoryError("std::bad_alloc"),  # of the host too
        RuntimeError("out of patience"),
        an_error("jaxlib._jax", "XlaRuntimeError", "INVALID_ARGUMENT: shapes"),
        an_error("mine", "OutOfMemoryError", "of my own"),
        ErrorWithoutText(),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_no_out_of_memory_errors(error: BaseException):
    assert not is_oom(error)


def test_oom_snapshot_has_the_memory_at_the_error(allocator: CachingAllocator):
    blocks = [allocator.malloc(8 * MIB) for _ in range(5)]
    allocator.malloc(900 * MIB)
    allocator.free(blocks[1])
    with agent.scope("epoch"):
        allocator.malloc(8 * MIB)
    with pytest.raises(OutOfMemory), agent.scope("epoch"), agent.scope("forward"):
        allocator.malloc(300 * MIB)
    (oom,) = agent.program().ooms
    assert (oom.number, oom.seen, oom.scope, oom.device_uuid) == (1, "scope", "epoch/forward", UUID)
    assert oom.request_bytes == 300 * MIB
    (pool,) = oom.pools
    now = allocator.usage()
    assert (pool.live_bytes, pool.cached_bytes, pool.stranded_bytes) == (now.live_bytes, 0, now.stranded_bytes)
    assert pool.largest_free_bytes == max(size for _, size, is_free in allocator.blocks() if is_free)
    assert [(scope.name, scope.retained_bytes) for scope in oom.scopes] == [("epoch", 8 * MIB)]


def test_error_counts_once_in_nested_scopes(allocator: CachingAllocator):
    with pytest.raises(OutOfMemory), agent.scope("a"), agent.scope("b"), agent.scope("c"):
        agent.retry_on_oom(allocator.malloc, attempts=1)(2000 * MIB)
    assert [(oom.number, oom.seen, oom.scope) for oom in agent.program().ooms] == [(1, "retry", "a/b/c")]
    OOMS.record_counters(agent.report())
    assert len(agent.program().ooms) == 1


def test_uncaught_error_is_recorded_by_its_counter(allocator: CachingAllocator):
    OOMS.record_counters(agent.report())
    assert agent.program().ooms == ()
    with pytest.raises(OutOfMemory):
        allocator.malloc(2000 * MIB)
    OOMS.record_counters(agent.report())
    OOMS.record_counters(agent.report())
    (oom,) = agent.program().ooms
    assert (oom.seen, oom.device_uuid, oom.request_bytes) == ("counter", UUID, None)


def test_errors_before_the_first_report_are_not_new(allocator: CachingAllocator):
    OOMS.record_counters((make_pool(ooms=3),))
    assert agent.program().ooms == ()
    OOMS.record_counters((make_pool(ooms=4),), is_final=True)
    assert len(agent.program().ooms) == 1


def test_error_that_a_counter_shows_before_it_arrives_is_recorded_once(allocator: CachingAllocator):
    OOMS.record_counters(agent.report())
    with agent.scope("epoch"):
        OOMS.record_counters((make_pool(UUID, ooms=1),))
    assert agent.program().ooms == ()
    with pytest.raises(OutOfMemory), agent.scope("epoch"):
        allocator.malloc(2000 * MIB)
    OOMS.record_counters(agent.report())
    (oom,) = agent.program().ooms
    assert (oom.seen, oom.device_uuid, oom.request_bytes) == ("scope", UUID, 2000 * MIB)


def test_error_that_another_thread_still_handles_is_recorded_as_a_whole(allocator: CachingAllocator):
    OOMS.record_counters(agent.report())
    caught, over = threading.Event(), threading.Event()

    def train() -> None:
        try:
            allocator.malloc(2000 * MIB)
        except OutOfMemory:
            caught.set()
            over.wait()

    thread = threading.Thread(target=train)
    thread.start()
    caught.wait()
    OOMS.record_counters(agent.report())
    over.set()
    thread.join()
    OOMS.record_counters(agent.report())
    (oom,) = agent.program().ooms
    assert (oom.seen, oom.device_uuid, oom.request_bytes) == ("counter", UUID, 2000 * MIB)
    assert "train" in {call.function.rpartition(".")[2] for call in oom.stack}


def test_newest_oom_snapshots_are_kept(allocator: CachingAllocator):
    for _ in range(KEPT + 3):
        with pytest.raises(OutOfMemory), agent.scope("x"):
            allocator.malloc(2000 * MIB)
    assert [oom.number for oom in agent.program().ooms] == list(range(4, KEPT + 4))
