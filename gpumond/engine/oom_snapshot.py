"""Sums and details of the record that an agent makes of an out-of-memory error. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumond.model.program import Call, LiveClasses, Oom, OomPool, Site
from gpumond.model.units import human

SHOWN_CALLS, SHOWN_THREAD_CALLS, SHOWN_THREADS = 8, 3, 4
SHOWN_SCOPES, SHOWN_CLASSES, SHOWN_SITES = 8, 8, 4
MAX_CALL = 200
"""Longest text of a call: an agent may send any."""
OF_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<")
"""Parts of the names of files that are not the program's own, unless they are of ``WITHOUT_FILE``."""
WITHOUT_FILE = ("<string>", "<stdin>")

Details = tuple[tuple[str, int | float | str], ...]


def amounts(oom: Oom) -> str:
    """Return the live, cached and stranded bytes of the device that was full as text."""
    live, cached, stranded = _sums(oom)
    return f"{human(live)} live, {human(cached)} cached, {human(stranded)} stranded"


def oom_details(oom: Oom) -> Details:
    """Return the known values for the details of an event."""
    live, cached, stranded = _sums(oom)
    largest = [pool.largest_free_bytes for pool in _concerned(oom) if pool.largest_free_bytes is not None]
    known: list[tuple[str, int | float | str | None]] = [
        ("number", oom.number),
        ("seen", oom.seen),
        ("scope", oom.scope or None),
        ("request_bytes", oom.request_bytes),
        ("live_bytes", live),
        ("cached_bytes", cached),
        ("stranded_bytes", stranded),
        ("largest_free_bytes", max(largest, default=None)),
        ("occurred_at", oom.at),
        *((f"kept_bytes {scope.name}", scope.kept_bytes) for scope in oom.scopes),
        ("open_scopes", ", ".join(oom.open_scopes[:SHOWN_SCOPES]) or None),
        *_growth(oom),
        *_classes(oom.device_uuid, oom.classes[:SHOWN_CLASSES]),
        *_sites(oom.sites),
        ("line", own_line(oom.stack) or None),
        ("stack", calls_text(oom.stack[:SHOWN_CALLS]) or None),
        *(
            (f"thread {thread.thread}", calls_text(thread.calls[:SHOWN_THREAD_CALLS]))
            for thread in oom.threads[:SHOWN_THREADS]
        ),
    ]
    return tuple((name, value) for name, value in known if value is not None)


def own_line(calls: Sequence[Call]) -> str:
    """Return the innermost call of the program itself, such as ``train.py:31 step``; empty if there is none."""
    own = [call for call in calls if call.file in WITHOUT_FILE or not any(part in call.file for part in OF_LIBRARIES)]
    return call_text(own[0]) if own else ""


def call_text(call: Call) -> str:
    return f"{call.file}:{call.line} {call.function}"[-MAX_CALL:]


def calls_text(calls: Sequence[Call]) -> str:
    """Return calls in one line, innermost first."""
    return " < ".join(map(call_text, calls))


def _growth(oom: Oom) -> Iterator[tuple[str, int | float]]:
    """Yield the change of live memory in the last minute, and the age of the sample that it refers to."""
    if oom.recent is not None and oom.recent.seconds and oom.pools:
        yield "recent_seconds", oom.recent.seconds[0]
        yield "recent_growth_bytes", sum(pool.live_bytes for pool in _concerned(oom)) - oom.recent.live_bytes[0]


def _classes(device_uuid: str | None, classes: Sequence[LiveClasses]) -> Iterator[tuple[str, int]]:
    for one in classes:
        if device_uuid in (None, one.device_uuid):
            sizes = (
                ("parameters_bytes", one.parameters_bytes),
                ("gradients_bytes", one.gradients_bytes),
                ("optimizer_bytes", one.optimizer_bytes),
                ("buffers_bytes", one.buffers_bytes),
                ("tensors_bytes", one.tensors_bytes),
                ("activations_bytes", one.activations_bytes),
                ("unclassified_bytes", one.unknown_bytes or None),
            )
            yield from ((f"{one.allocator} {name}", size) for name, size in sizes if size is not None)


def _sites(sites: Sequence[Site]) -> Iterator[tuple[str, str]]:
    for number, site in enumerate(sites[:SHOWN_SITES], 1):
        yield f"site {number}", f"{human(site.size_bytes)}: {calls_text(site.calls[:SHOWN_THREAD_CALLS])}"


def _sums(oom: Oom) -> tuple[int, int, int]:
    pools = _concerned(oom)
    return (
        sum(pool.live_bytes for pool in pools),
        sum(pool.cached_bytes for pool in pools),
        sum(pool.stranded_bytes for pool in pools),
    )


def _concerned(oom: Oom) -> list[OomPool]:
    """Return the pools of the device that was full; all of them if the device is unknown."""
    return [pool for pool in oom.pools if oom.device_uuid in (None, pool.device_uuid)]
