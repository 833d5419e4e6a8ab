"""What outlives the daemon, as the store keeps it: values and their JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from gpumond.history import Coarse
from gpumond.store.audit_chain import canonical


def to_text(value: Any) -> str:
    return canonical(asdict(value))


def coarse_text(series: Coarse) -> str:
    """As ``to_text``, and without a copy of each of its numbers."""
    return canonical({field.name: getattr(series, field.name) for field in fields(series)})
