"""Hashes by which the settings and rules of several machines can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from pydantic import TypeAdapter

from gpumond.config.settings import Settings
from gpumond.facts.alerts import Rule

OF_ONE_MACHINE = ("listen", "hosts", "socket", "runtime_dir", "state_dir")
"""Settings that differ between machines with the same configuration: addresses and directories."""
DIGITS = 12
ANY: TypeAdapter[Any] = TypeAdapter(Any)


def of_settings(settings: Settings) -> str:
    """Return the hash of the settings, without those of one machine."""
    values = ANY.dump_python(settings, mode="json")
    return _hash({name: value for name, value in values.items() if name not in OF_ONE_MACHINE})


def of_rules(rules: Iterable[Rule]) -> str:
    """Return the hash of rules, in whatever order."""
    return _hash(sorted((ANY.dump_python(rule, mode="json") for rule in rules), key=lambda rule: str(rule["name"])))


def _hash(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]
