"""Features: each folder adds one subject to the daemon, the command line and the web UI.

To add a feature, write a folder with a ``FEATURE`` and add its name here, or publish it as an entry point of the group
``gpumond.features``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from gpumond.feature import Feature, installed_features

NAMES = (
    "baselines",
    "engines",
    "flush",
    "rules",
    "silences",
    "quotas",
    "oom",
    "alerts",
    "fit",
    "suspend",
    "agent_requests",
    "audit",
    "fleet",
    "recordings",
    "loadgen",
)
"""In the order in which their parts are made, conclude and act; they are closed in reverse. A feature that uses the
service of another one follows it.
"""
FEATURES: tuple[Feature, ...] = tuple(import_module(f"{__name__}.{name}").FEATURE for name in NAMES)


@cache
def features() -> tuple[Feature, ...]:
    """Return the features of this package and of other installed packages."""
    return (*FEATURES, *installed_features())


def routers() -> tuple[Any, ...]:
    """Import and return the routers of all features."""
    return tuple(feature.resolve(name) for feature in features() for name in feature.routes)
