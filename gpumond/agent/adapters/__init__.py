"""Allocators of the program that carries the agent. An adapter reads; it never imports its library.

To add one: write ``adapters/NAME.py`` with a function ``adapter()`` and the class that it returns,
and add the library's module name to ``KNOWN``. The function may return None while there is nothing to read yet.
An adapter whose steps are safe in the main thread only names them in ``main_thread_steps``; one that holds on to
something from an exact read on has ``finish()``, which is called when the flush or the plan is over. ``left()``, asked
for a plan or a flush, tells by device how many of a pool's free bytes would stay, where the blocks in use show it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from gpumond.model.pools import HostPool, PoolUsage, StepResult

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
"""Module that the host program may have imported -> our adapter for it, or ours that those adapters have.

In the order in which they are flushed: what allocates from another library comes before it.
"""


class FlushRefused(Exception):
    """A flush would be unsafe now; the message says why. Nothing was done."""


class AllocatorAdapter(Protocol):
    """Reads and flushes one library's pools. Never imports the library, never creates a context."""

    name: str

    def framework(self) -> str:
        """Library and version, as in ``torch 2.13.0``."""

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """The pools now, empty while the library is not initialised.

        ``exact`` may take milliseconds and narrows ``reclaimable`` as far as the library allows.
        """

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Carries out those of ``steps`` that the library has, in order. Raises Refused."""


def present(known: Mapping[str, str] = KNOWN) -> Iterator[AllocatorAdapter]:
    """Adapters for the libraries that the program has imported by itself, fully."""
    for library, ours in known.items():
        module = sys.modules.get(library)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        adapter = import_module(ours).adapter()
        if adapter is not None:
            yield adapter


def host_pools(adapters: Iterable[AllocatorAdapter]) -> tuple[HostPool, ...]:
    """The pinned host memory of those libraries that tell it."""
    found: list[HostPool] = []
    for adapter in adapters:
        try:
            found += getattr(adapter, "host_pools", tuple)()
        except Exception:  # the library's own; the others are still read
            continue
    return tuple(found)
