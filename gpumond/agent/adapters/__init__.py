"""Adapters for the allocators of the program that the agent runs in. An adapter never imports its library.

An adapter is a class of `AllocatorAdapter`, plus one base class for each optional capability that it has: `Finishable`,
`HostPoolReporting`, `LargestFreeReporting`, `Limitable`, `MainThreadBound`, `OomObservable`, `RetentionReporting`,
`Snapshottable`. The agent tests for a capability with `isinstance` and looks up no other member.

To add one: write ``adapters/NAME.py`` with the class and a function ``adapter()`` that returns it, or None while there
is nothing to read, and add the library's module name to ``KNOWN``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpumond.model.pools import HostPool, PoolUsage, StepResult
from gpumond.model.program import AppliedLimit

if TYPE_CHECKING:
    from gpumond.agent import cuda as cuda_module

KNOWN: Mapping[str, str] = {
    "torch": "gpumond.agent.adapters.torch",
    "torch.xpu": "gpumond.agent.adapters.torch_xpu",
    "cupy": "gpumond.agent.adapters.cupy",
    "cudf": "gpumond.agent.adapters.cudf",
    "rmm": "gpumond.agent.adapters.rmm",
    "tensorflow": "gpumond.agent.adapters.tensorflow",
    "jax": "gpumond.agent.adapters.jax",
    "gpumond.agent.cuda": "gpumond.agent.adapters.mempools",
    "gpumond.sim.allocator": "gpumond.agent.adapters.sim",
}
"""Modules that the program, or an adapter, may have imported, each with its adapter, in the order of flushes.

An allocator that allocates from another library comes before it.
"""


class FlushRefused(Exception):
    """A flush, limit or snapshot is unsafe or impossible now; the message says why. Nothing was done."""


class AllocatorAdapter(Protocol):
    """Reads and flushes one library's pools. Never imports the library, never creates a context."""

    name: str

    def framework(self) -> str:
        """Return the library and its version, such as ``torch 2.13.0``."""

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Return the current pools; empty while the library is not initialised.

        ``exact`` may take milliseconds and narrows ``reclaimable`` as far as the library allows.
        """

    def check(self) -> None:
        """Raise FlushRefused while no step may run. Changes nothing."""

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Carry out those of ``steps`` that the library has, in order. Raises FlushRefused."""


@runtime_checkable
class MainThreadBound(Protocol):
    """An adapter with steps that are safe in the main thread only."""

    main_thread_steps: frozenset[str]


@runtime_checkable
class Finishable(Protocol):
    """An adapter that keeps state from an exact read until the flush or plan is over."""

    def finish(self) -> None:
        """Discard that state."""


@runtime_checkable
class RetentionReporting(Protocol):
    """An adapter that can locate the blocks in use, and so predict the free bytes that a flush cannot return."""

    def retained_bytes(self) -> Mapping[str, int]:
        """Return these bytes by device UUID, without the devices for which they are unknown. For plans and flushes."""


@runtime_checkable
class Limitable(Protocol):
    """An adapter whose library can be limited at run time."""

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        """Set the limit, or remove it if ``limit_bytes`` is None. Raises FlushRefused.

        ``device``: a UUID, the program's own device number, or None for all devices.
        """


@runtime_checkable
class Snapshottable(Protocol):
    """An adapter whose library writes memory snapshots. ``suffix``: the file name extension, such as ``.json``."""

    suffix: str

    def dump(self, path: str, guarded: bool) -> None:
        """Write to a path that can only be appended to. ``guarded``: refuse a snapshot that would stall the program.

        Raises FlushRefused.
        """


@runtime_checkable
class OomObservable(Protocol):
    """An adapter whose library can report an out-of-memory error before it raises it."""

    def observe_ooms(self, observed: Callable[[str | None, int], None]) -> bool:
        """Register ``observed(device UUID, requested bytes)`` permanently. Return False if that is impossible now."""


@runtime_checkable
class LargestFreeReporting(Protocol):
    """An adapter that knows the free blocks of its pools."""

    def largest_free_bytes(self) -> Mapping[str, int]:
        """Return the size of the largest free block by device UUID; empty if the search would take too long."""


@runtime_checkable
class HostPoolReporting(Protocol):
    """An adapter whose library has pools of pinned host memory."""

    def host_pools(self) -> Sequence[HostPool]:
        """Return the current pools."""


class CaptureGuards(Protocol):
    """The functions of `gpumond.agent.cuda` that keep the agent from disturbing captures of CUDA graphs."""

    def capture_safe(self) -> AbstractContextManager[None]: ...
    def between_captures(self) -> AbstractContextManager[None]: ...
    def make_thread_capture_safe(self) -> None: ...


def capture_guards() -> CaptureGuards | None:
    """Return `gpumond.agent.cuda` if an adapter has imported it, as each adapter does that queries the driver."""
    if TYPE_CHECKING:
        return cuda_module
    return sys.modules.get("gpumond.agent.cuda")


def present(known: Mapping[str, str] = KNOWN) -> Iterator[AllocatorAdapter]:
    """Yield adapters for the libraries that the program has imported by itself, completely."""
    for library, ours in known.items():
        module = sys.modules.get(library)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        adapter = import_module(ours).adapter()
        if adapter is not None:
            yield adapter


def host_pools(adapters: Iterable[AllocatorAdapter]) -> tuple[HostPool, ...]:
    """Return the pinned host memory of all libraries that report it."""
    found: list[HostPool] = []
    for adapter in adapters:
        if isinstance(adapter, HostPoolReporting):
            try:
                found += adapter.host_pools()
            except Exception:  # an error of the library; read the other libraries all the same
                continue
    return tuple(found)
