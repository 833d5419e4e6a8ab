"""Quotas in the configuration file and in the API."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from gpumond.config.models import StrictModel
from gpumond.facts import units
from gpumond.facts.quota import Quota
from gpumond.facts.units import has_control_characters, size_text

MAX_BYTES = 2**62
MAX_PATTERN_CHARACTERS = 256


def _parse_size(value: object) -> object:
    """Convert a text such as 40GiB to bytes; the model checks any other value. Raises ValueError."""
    if isinstance(value, str):
        if not re.fullmatch(SIZE_PATTERN, value):
            hint = ", not a fraction of the device" if "%" in value else ""
            raise ValueError(f"expected a size such as 40GiB{hint}")
        return units.parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a size such as 40GiB, or a whole number of bytes")
    return value


SIZE_PATTERN = r"[0-9]{1,18}(\.[0-9]{1,9})?( ?(B|[KMGT]iB|[kMGT]B))?"
SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": MAX_BYTES},
        {"type": "string", "pattern": f"^{SIZE_PATTERN}$"},
    ]
}
Size = Annotated[int, BeforeValidator(_parse_size), Field(ge=1, le=MAX_BYTES), WithJsonSchema(SIZE_SCHEMA)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]


def _is_restrictive(pattern: str | None) -> bool:
    """Return True for a pattern that does not match every text."""
    return bool(pattern) and not set(pattern or "") <= {"*", "?"}


class QuotaMatch(StrictModel):
    """Patterns with ``*``, ``?`` and ``[...]`` for the attributes of a process. All that are given must match."""

    workload: Pattern | None = Field(None, description="the agent's workload; without an agent, the command name")
    user: Pattern | None = Field(None, description="user name or uid")
    container: Pattern | None = Field(None, description="container name or ID")
    namespace: Pattern | None = Field(None, description="the pod's Kubernetes namespace")

    @model_validator(mode="after")
    def _check_patterns(self) -> QuotaMatch:
        patterns = self.model_dump(exclude_none=True)
        if not patterns:
            raise ValueError('expected a pattern for workload, user, container or namespace; workload: "*" matches all')
        for name, pattern in patterns.items():
            if has_control_characters(pattern):
                raise ValueError(f"{name}: {pattern!r:.40} has a control character, such as a newline; remove it")
        return self


class QuotaConfig(StrictModel):
    """Limits of each process that matches, on each device. Sizes are strings such as `40GiB`, or bytes."""

    name: str = Field(pattern=r"^[a-z0-9_-]{1,64}$", description="name in alerts, `status` and the audit log")
    match: QuotaMatch = Field(description="the processes that the quota applies to")
    soft_limit: Size | None = Field(None, description="memory above which the alert `quota-exceeded` is active")
    limit: Size | None = Field(None, description="limit that the daemon sets in programs that allow it")
    reserve: Size | None = Field(
        None,
        description="memory that the daemon keeps available for the processes together; requires a user or namespace",
    )
    cgroup_limit: Size | None = Field(
        None,
        description="limit that NVIDIA's driver enforces on each matching container, for all its processes together; "
        "requires a container or namespace, driver 615 and root",
    )

    @model_validator(mode="after")
    def _check_amounts(self) -> QuotaConfig:
        if all(size is None for size in (self.soft_limit, self.limit, self.reserve, self.cgroup_limit)):
            raise ValueError("set at least one of soft_limit, limit, reserve and cgroup_limit")
        if self.cgroup_limit is not None and (self.match.workload or self.match.user):
            raise ValueError(
                "cgroup_limit: match only on container or namespace, because the limit applies to every program in the "
                "container"
            )
        if self.soft_limit is not None and self.limit is not None and self.soft_limit > self.limit:
            raise ValueError(f"soft_limit {size_text(self.soft_limit)} must not exceed limit {size_text(self.limit)}")
        if self.reserve is not None and not any(map(_is_restrictive, (self.match.user, self.match.namespace))):
            raise ValueError(
                "reserve: also match on user or namespace (not *), because any program can claim any workload name"
            )
        if self.reserve is not None and self.limit is not None and self.reserve > self.limit:
            raise ValueError(f"reserve {size_text(self.reserve)} must not exceed limit {size_text(self.limit)}")
        return self

    def quota(self) -> Quota:
        return Quota(
            name=self.name,
            **self.match.model_dump(),
            soft_limit_bytes=self.soft_limit,
            limit_bytes=self.limit,
            reserve_bytes=self.reserve,
            cgroup_limit_bytes=self.cgroup_limit,
        )
