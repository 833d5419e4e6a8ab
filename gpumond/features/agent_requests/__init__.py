"""Requests to the agents of programs other than a flush: what live memory consists of, snapshots and limits."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("retainer_requests:RetainerRequestsPart",),
    routes=("routes:router",),
    commands=(
        Command(
            "limit",
            "Memory",
            "limit how much memory each of your program's allocators may hold",
            ("gpumond limit --pid 4242 40GiB", "gpumond limit --workload train --device 0 none"),
            module="command:LimitCommand",
        ),
        Command(
            "why",
            "Programs",
            "show what your program's live memory consists of",
            ("gpumond why --workload train", "gpumond why --pid 4242 --record 60s --folded sites.folded"),
        ),
        Command(
            "snapshot",
            "Programs",
            "make programs write memory snapshots; with --out, download one snapshot",
            ("gpumond snapshot --pid 4242 --out memory.pickle",),
            module="command:SnapshotCommand",
        ),
    ),
)
