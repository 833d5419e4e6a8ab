"""Messages with names that were never used before, for ``bench.flood``."""

from __future__ import annotations

from collections.abc import Iterator

from gpumond.model.pools import PoolUsage, Reclaimable
from gpumond.model.program import Program, ScopeUsage
from gpumond.protocol.messages import Hello, Report, encode


def hello(fresh: Iterator[int]) -> bytes:
    return encode(Hello(f"w{next(fresh)}"))


def report(fresh: Iterator[int], names: int) -> bytes:
    pools = tuple(
        PoolUsage(f"a{next(fresh)}", f"GPU-{next(fresh)}", 1, 1, Reclaimable(0, 0, 0), 0) for _ in range(names)
    )
    scopes = tuple(ScopeUsage(f"s{next(fresh)}", 1) for _ in range(names))
    return encode(Report(pools=pools, program=Program(scopes)))
