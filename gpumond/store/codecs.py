"""JSON of stored values. No I/O."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from gpumond.history import Coarse
from gpumond.store.audit_chain import canonical


def to_text(value: Any) -> str:
    return canonical(asdict(value))


def coarse_text(series: Coarse) -> str:
    """Encode like ``to_text``, without a copy of each number."""
    return canonical({field.name: getattr(series, field.name) for field in fields(series)})
