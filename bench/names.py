"""Messages with names that were never used before, for ``bench.flood``."""

from __future__ import annotations

from collections.abc import Iterator

from gpumond.facts.messages import Hello, Report, encode
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.program import Program, ScopeUsage


def hello_message(fresh: Iterator[int]) -> bytes:
    return encode(Hello(f"w{next(fresh)}"))


def report_message(fresh: Iterator[int], names: int) -> bytes:
    pools = tuple(
        PoolUsage(
            allocator=f"a{next(fresh)}",
            device_uuid=f"GPU-{next(fresh)}",
            live_bytes=1,
            held_bytes=1,
            reclaimable=Reclaimable(0, 0, 0),
            stranded_bytes=0,
        )
        for _ in range(names)
    )
    scopes = tuple(ScopeUsage(name=f"s{next(fresh)}", entries=1) for _ in range(names))
    return encode(Report(pools=pools, program=Program(scopes=scopes)))
