"""Features: each folder adds one subject to the daemon, the command line and the web UI.

To add a feature, write a folder with a ``FEATURE`` and add it here, or publish it as an entry point of the group
``gpumond.features``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from gpumond.feature import Feature, installed_features, resolve
from gpumond.features import (
    alerts,
    audit,
    baselines,
    engines,
    fit,
    fleet,
    flush,
    instruments,
    loadgen,
    oom,
    quotas,
    recordings,
    rules,
    silences,
    suspend,
)

FEATURES: tuple[Feature, ...] = (
    baselines.FEATURE,
    engines.FEATURE,
    flush.FEATURE,
    rules.FEATURE,
    silences.FEATURE,
    quotas.FEATURE,
    oom.FEATURE,
    alerts.FEATURE,
    fit.FEATURE,
    suspend.FEATURE,
    instruments.FEATURE,
    audit.FEATURE,
    fleet.FEATURE,
    recordings.FEATURE,
    loadgen.FEATURE,
)
"""In the order in which their parts are made, conclude and act; they are closed in reverse. A feature that uses the
service of another one follows it.
"""


@cache
def features() -> tuple[Feature, ...]:
    """Return the features of this package and of other installed packages."""
    return (*FEATURES, *installed_features())


def routers() -> tuple[Any, ...]:
    """Import and return the routers of all features."""
    return tuple(resolve(name) for feature in features() for name in feature.routes)
