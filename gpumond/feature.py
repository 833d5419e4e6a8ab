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

ENTRY_POINT_GROUP = "gpumond.features"
"""Entry points of installed packages, each a Feature."""


@dataclass(frozen=True)
class Command:
    """A command of the command line. ``module``, or ``module:name`` for one of several in a module, has
    ``add_arguments(parser)`` and ``run(arguments) -> exit code``.
    """

    name: str
    group: str
    help: str
    examples: tuple[str, ...]
    module: str = "command"


@dataclass(frozen=True)
class Feature:
    """What one package adds: ``parts``, classes of `core.Part` that take the core, and ``routes``, FastAPI routers.

    Both, and the modules of the commands, are ``module:name`` in the package.
    """

    package: str
    parts: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    commands: tuple[Command, ...] = ()

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]

    def resolve(self, name: str) -> Any:
        """Import what ``module:name`` is in the package."""
        return resolve(f"{self.package}.{name}")


def resolve(name: str) -> Any:
    """Import ``module:attribute``, or a module."""
    module, _, attribute = name.partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported


def installed_features() -> Iterator[Feature]:
    """Yield the features of other installed packages."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        yield point.load()
