"""The record of a feature: what one folder adds to the daemon, the command line and the web UI. Standard library only.

Values that need a library are dotted names, which are imported at their first use: the command line stays fast, and
the agent's programs never import them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

GROUP = "gpumond.features"
"""Entry points of installed packages, each a Feature."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the command line. ``module``, or ``module:name`` for one of several in a module, has
    ``add_arguments(parser)`` and ``run(arguments) -> exit code``.
    """

    name: str
    module: str
    help: str
    group: str
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """``parts``: classes of `kernel.Part`, which take the kernel; ``routes``: FastAPI routers; as ``module:name``."""

    name: str
    parts: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    commands: tuple[Command, ...] = ()


def resolve(name: str) -> Any:
    """Import ``module:attribute``, or a module."""
    module, _, attribute = name.partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported


def installed_features() -> Iterator[Feature]:
    """Yield the features of other installed packages."""
    for point in entry_points(group=GROUP):
        yield point.load()
