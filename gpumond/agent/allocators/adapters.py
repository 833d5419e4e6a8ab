"""Adapters for the allocators of the program that the agent runs in. An adapter never imports its library.

An adapter is a class of `AllocatorAdapter`, whose optional methods are those that its library has. What only a library
of tensors has is in `HistoryRecording` and `TensorTracking`.

To add one: write ``allocators/NAME.py`` with the class and a function ``adapter()`` that returns it, or None while
there is nothing to read, and add its `AdapterSpec` to ``ADAPTERS``: search, errors, ``gpumond doctor`` and
docs/reference/plugins.md derive from it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from gpumond.agent.imports import is_importing
from gpumond.facts.messages import printable_text
from gpumond.facts.pools import HostPool, PoolUsage, StepResult
from gpumond.facts.program import AllocationSite, AppliedLimit, Call, Dump, LiveClasses

if TYPE_CHECKING:
    from gpumond.agent.allocators import cuda as cuda_module


class AdapterSpec:
    """One adapter: the library that the program, or another adapter, imports, and the module of the adapter.

    ``packages``: names under which the library is installed. ``oom_error``: package and class of the library's errors
    that always mean out of memory. ``oom_texts``: for classes with several meanings, the pattern of the text of those
    that do. A plain class: a dataclass would cost each program half a millisecond.
    """

    def __init__(
        self,
        library: str,
        module: str,
        packages: tuple[str, ...] = (),
        oom_error: tuple[str, str] | None = None,
        oom_texts: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.library, self.module, self.packages = library, f"{__package__}.{module}", packages
        self.oom_error, self.oom_texts = oom_error, oom_texts


def _cuda_wheels(name: str) -> tuple[str, ...]:
    return name, f"{name}-cu11", f"{name}-cu12", f"{name}-cu13"


_RUNTIME_OOM = r"(CUDA|HIP) (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED"
_XLA_OOM = "RESOURCE_EXHAUSTED"

ADAPTERS = (
    AdapterSpec("torch", "torch", ("torch",), ("torch", "OutOfMemoryError"), (("RuntimeError", _RUNTIME_OOM),)),
    AdapterSpec("torch.xpu", "torch_xpu"),
    AdapterSpec(
        "cupy",
        "cupy",
        ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
        ("cupy", "OutOfMemoryError"),
        (("CUDARuntimeError", "cudaErrorMemoryAllocation"),),
    ),
    AdapterSpec("cudf", "cudf", _cuda_wheels("cudf")),
    AdapterSpec(
        "rmm",
        "rmm",
        _cuda_wheels("rmm"),
        oom_texts=(("MemoryError", r"(?s)std::bad_alloc.*out_of_memory"),),  # that of host memory has another text
    ),
    AdapterSpec(
        "numba.cuda",
        "numba",
        ("numba-cuda",),
        oom_texts=(("CudaAPIError", "CUDA_ERROR_OUT_OF_MEMORY"),),
    ),
    AdapterSpec("paddle", "paddle", ("paddlepaddle-gpu",), oom_texts=(("MemoryError", r"Out of memory error on GPU"),)),
    AdapterSpec("warp", "warp", ("warp-lang",)),
    AdapterSpec("cuda.core", "cuda_core", ("cuda-core",), oom_texts=(("CUDAError", "CUDA_ERROR_OUT_OF_MEMORY"),)),
    AdapterSpec("tensorflow", "tensorflow", ("tensorflow",), ("tensorflow", "ResourceExhaustedError")),
    AdapterSpec("jax", "jax", ("jax",), oom_texts=(("XlaRuntimeError", _XLA_OOM), ("JaxRuntimeError", _XLA_OOM))),
    AdapterSpec("comfy_aimdo.model_vbar", "aimdo", ("comfy-aimdo",)),
    AdapterSpec("gpumond.agent.allocators.cuda", "mempools"),
    AdapterSpec("gpumond.agent.allocators.cuda", "managed"),
    AdapterSpec("gpumond.sim.allocator", "sim", oom_error=("gpumond", "OutOfMemory")),
)
"""All adapters in the order of flushes: an allocator that allocates from another library comes before it."""


MAX_FILE, MAX_FUNCTION = 160, 80
"""Longest names in a call of a stack."""


def to_call(file: str, line: int, function: str) -> Call:
    """Return a call as a report may contain it. The ends of long names are kept."""
    return Call(printable_text(file[-MAX_FILE:]), max(0, line), printable_text(function[-MAX_FUNCTION:]))


class FlushRefused(Exception):
    """A flush, limit or snapshot is unsafe or impossible; the message states the reason. Nothing was done."""


class TensorsBusy(Exception):
    """The program's tensors couldn't be read while it may change them; the message states the reason."""


class AllocatorAdapter:
    """Reads and flushes one library's pools. Never imports the library, never creates a context.

    The methods from `bytes_left_by_flush` on are optional: here they are those of a library that lacks the ability.
    """

    name: str

    flush_step = ""
    """The step that `release` carries out, if there is only one."""

    main_thread_steps: frozenset[str] = frozenset()
    """Steps that are safe in the main thread only."""

    snapshot_suffix = ""
    """Extension of the names of memory snapshots, such as ``.json``, if the library writes them with `dump`."""

    def framework(self) -> str:
        """Return the library and its version, such as ``torch 2.13.0``."""
        return f"{self.name} {sys.modules[self.name].__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Return the current pools; empty while the library is not initialized.

        ``exact`` may take milliseconds and narrows ``reclaimable`` as far as the library allows.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise FlushRefused while no step may run. Changes nothing."""

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Carry out those of ``steps`` that the library has, in order. Raises FlushRefused."""
        self.check()
        if self.flush_step not in steps:
            return ()
        started = time.perf_counter()
        released, detail = self.release()
        return (StepResult(self.flush_step, max(0, released), time.perf_counter() - started, detail),)

    def release(self) -> tuple[int, str]:
        """Carry out the only step. Return the released bytes, and a detail or an empty text. Raises FlushRefused."""
        raise NotImplementedError

    def bytes_left_by_flush(self) -> Mapping[str, int]:
        """Return the free bytes that a flush cannot return, by device UUID, by the location of the blocks in use. For
        plans and flushes.
        """
        return {}

    def discard_exact_state(self) -> None:
        """Discard the state that is kept from an exact read until the flush or plan is over."""

    def host_pools(self) -> Sequence[HostPool]:
        """Return the current pools of pinned host memory."""
        return ()

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        """Set the limit, or remove it if ``limit_bytes`` is None. Raises FlushRefused.

        ``device``: a UUID, the program's own device number, or None for all devices.
        """
        raise FlushRefused(f"{self.name} can't be limited at run time")

    def own_limits(self) -> Mapping[str, int]:
        """Return the limits that the program has set with the library's own functions, by device UUID.

        They apply again when a limit is removed. Raises FlushRefused.
        """
        return {}

    def dump(self, path: str, must_be_fast: bool) -> None:
        """Write a snapshot to a path that can only be appended to. Raises FlushRefused.

        ``must_be_fast``: refuse a snapshot that would stall the program.
        """
        raise FlushRefused(f"{self.name} has no snapshot")

    def annotate(self, text: str) -> Callable[[], object] | None:
        """Annotate the calling thread's next allocations in the memory history that the library records.

        Return a function that restores the annotation before; None if no history is recorded, or if it has none.
        """
        return None

    def largest_free_bytes(self) -> Mapping[str, int]:
        """Return the size of the largest free block by device UUID; empty if the search would take too long."""
        return {}


@runtime_checkable
class HistoryRecording(Protocol):
    """An adapter whose library can record the stacks of its allocations."""

    def start_history(self) -> None:
        """Turn the record on. Raises FlushRefused, also if the program records by itself."""

    def live_sites(self) -> Sequence[AllocationSite]:
        """Return live memory by site while a record is on, whoever turned it on, largest first; else nothing.

        It is empty if the search would take too long.
        """

    def finish_history(self, write: Callable[[object], Dump]) -> tuple[Dump, Sequence[AllocationSite], int]:
        """Turn the record off. ``write`` pickles the library's snapshot to a file.

        Return the file, live memory by site, and the live bytes that were allocated before the record.
        """


class TrackedTensor(NamedTuple):
    """One tensor. ``size_bytes`` is that of its storage. ``has_graph``: it keeps the graph that computed it."""

    tensor: Any
    size_bytes: int
    has_graph: bool


@runtime_checkable
class TensorTracking(Protocol):
    """An adapter whose library has Python objects for its memory, by which live bytes can be classified."""

    def live_classes(self, search_seconds: float = 0.0) -> Sequence[LiveClasses]:
        """Return the classes of live bytes by device; empty while nothing is live.

        It takes some milliseconds, and with ``search_seconds`` about as long as this, for classes that require a search
        of all objects. A search raises TensorsBusy.
        """

    def find_older_objects(self) -> None:
        """Find the objects that the program created before the agent, once."""

    def tracked_tensors(self) -> Sequence[TrackedTensor]:
        """Return all tensors that are on a device. It may take some tens of milliseconds. Raises TensorsBusy."""


class CaptureGuards(Protocol):
    """Functions of `allocators.cuda` by which the agent neither disturbs captures of CUDA graphs nor acts too late."""

    def is_capturing(self) -> bool: ...
    def relaxed_capture_mode(self) -> AbstractContextManager[None]: ...
    def delayed_captures(self) -> AbstractContextManager[None]: ...
    def relax_thread_capture_mode(self) -> None: ...
    def is_suspended(self) -> bool: ...
    def wait_for_driver(self) -> None: ...


def capture_guards() -> CaptureGuards | None:
    """Return `allocators.cuda` if an adapter has imported it, as each adapter does that queries the driver."""
    if TYPE_CHECKING:
        return cuda_module
    return _imported_module("gpumond.agent.allocators.cuda")


def _imported_module(name: str) -> Any:
    """Return a module that is completely imported, None otherwise."""
    module = sys.modules.get(name)
    return None if is_importing(module) else module


def adapter_if_imported(spec: AdapterSpec) -> AllocatorAdapter | None:
    """Return the adapter if the program has imported its library by itself, completely."""
    if _imported_module(spec.library) is None:
        return None
    # Python 3.10's import_module takes the module's lock each time, which a child forked meanwhile never gets.
    module = _imported_module(spec.module) or import_module(spec.module)
    adapter: AllocatorAdapter | None = module.adapter()
    return adapter
