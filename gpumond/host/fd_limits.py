"""Allocation of this process's file descriptors among its parts, so that none can exhaust those of another."""

from __future__ import annotations

import resource

TARGET = 16384
OTHERS = 64
"""Descriptors for the store, the collector process, receivers, logs, and connections that are being closed."""
MAX_CONNECTIONS = 1024
RESERVED_CONNECTIONS = 16
"""Additional connections, reserved for /metrics and probes."""


def raise_limit() -> None:
    """Raise RLIMIT_NOFILE to at most TARGET, within the hard limit; many systems start programs with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = TARGET if hard == resource.RLIM_INFINITY else min(TARGET, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def http_connections(limit: int | None = None) -> int:
    """Return the limit of HTTP connections: a quarter of what OTHERS leaves, at most MAX_CONNECTIONS."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return MAX_CONNECTIONS if limit < 0 else max(8, min(MAX_CONNECTIONS, (limit - OTHERS) // 4))


def kept_from_agents() -> int:
    """Return the number of descriptors that are not available to agent connections."""
    return OTHERS + http_connections() + RESERVED_CONNECTIONS


def http_connections_of_user(connections: int) -> int:
    """Return the limit of HTTP connections per user; all clients behind a proxy or tunnel count as one user."""
    return max(1, connections * 3 // 4)
