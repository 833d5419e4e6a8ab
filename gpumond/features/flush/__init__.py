"""Verified flushes: plan, execute, verify, receipt."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    parts=("flusher:FlushPart",),
    routes=("routes:router", "routes:receipts_router", "routes:hooks_router"),
    commands=(
        Command(
            "flush",
            "Memory",
            "make programs release cached memory, and print the receipts",
            (
                "gpumond flush --workload train --dry-run",
                "gpumond flush --pid 4242",
                "gpumond flush --device 0 --step gc --step cache --min-reclaimable 1GiB",
            ),
        ),
        Command(
            "receipts",
            "Memory",
            "show the receipts of past flushes, suspensions and resumptions",
            ("gpumond receipts --limit 10",),
            module="command:ReceiptsCommand",
        ),
    ),
)
