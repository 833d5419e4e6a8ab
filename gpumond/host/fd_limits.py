"""How the file descriptors that this process may have are shared out, so that no part takes those of another."""

from __future__ import annotations

import resource

WANTED = 16384
OTHERS = 64
"""The store, the driver's process, receivers, logs, and connections that are being closed."""
MAX_CONNECTIONS = 1024
RESERVED_CONNECTIONS = 16
"""Besides these, for /metrics and probes."""


def raise_limit() -> None:
    """As far as the hard limit goes and the daemon can use; many systems start programs with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def http_connections(limit: int | None = None) -> int:
    """How many HTTP connections there may be: a quarter of what the others leave, at most 1024."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return MAX_CONNECTIONS if limit < 0 else max(8, min(MAX_CONNECTIONS, (limit - OTHERS) // 4))


def kept_from_agents() -> int:
    """What agents' connections may not take."""
    return OTHERS + http_connections() + RESERVED_CONNECTIONS


def http_connections_of_user(connections: int) -> int:
    """How many of them one user may have: 100 viewers behind a proxy or a tunnel are one user."""
    return max(1, connections * 3 // 4)
