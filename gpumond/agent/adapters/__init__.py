"""Allocators of the program that carries the agent. An adapter reads; it never imports its library.

To add one: write ``adapters/NAME.py`` with a function ``adapter()`` and the class that it returns,
and add the library's module name to ``KNOWN``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from gpumond.model import PoolUsage, StepResult

KNOWN: Mapping[str, str] = {
    "torch": "gpumond.agent.adapters.torch",
    "cupy": "gpumond.agent.adapters.cupy",
    "gpumond.sim.allocator": "gpumond.agent.adapters.sim",
}
"""Module that the host program may have imported -> our adapter for it."""


class Refused(Exception):
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
        yield import_module(ours).adapter()
