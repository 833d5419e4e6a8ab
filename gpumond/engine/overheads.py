"""The parts of each process's overhead, as far as they were seen. No I/O.

The overhead is the driver's count less the bytes that allocators hold. The two are read at different times: it is taken
when neither changes. The first value of a process whose agent was there before it used the device is its context, with
what CUDA has loaded by then. When the agent first states a component (NCCL, CUDA graphs, Triton), the growth of the
overhead to the next value came with it. The rest has no known cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpumond.model.claims import held_by_device
from gpumond.model.snapshot import AgentReport, DeviceReading, Overhead, Snapshot, Suspension

COMPONENTS: Mapping[str, str] = {"nccl": "with NCCL", "graphs": "with CUDA graphs", "triton": "with Triton kernels"}
"""By the name that agents state: the name of the part. Others are ignored."""
CONTEXT = "context"
FIRST_SECONDS = 30.0
"""Time after which a first value is not that of the context: the program has run for too long."""
SETTLING_SECONDS = 2.0
"""Time from the first sight of a component until its memory is allocated."""


def following(
    devices: Sequence[DeviceReading],
    reports: Sequence[AgentReport],
    suspensions: Sequence[Suspension],
    previous: Snapshot | None,
    elapsed: float,
) -> Iterator[Overhead]:
    """Yield the state of each process with an agent on each device that counts its memory."""
    if previous is None:
        return
    before = {(each.device_uuid, each.process): each for each in previous.overheads}
    yield from (before[key] for each in suspensions if (key := (each.device_uuid, each.process)) in before)
    by_process = {report.key: report for report in reports}
    for device in devices:
        for process, count in device.counts.items():
            report = by_process.get(process)
            if report is None or count is None:
                continue
            known = before.get((device.uuid, process))
            if known is None:
                # Without an agent that was there before the context, nobody knows what the first value contains.
                last = previous.device(device.uuid)
                if last is None or process in last.counts or process not in previous.reports_by_process:
                    continue
                pid, start_ticks = process
                known = Overhead(device_uuid=device.uuid, pid=pid, start_ticks=start_ticks, began=elapsed)
            after = _next(known, report, count, elapsed)
            if after is not None:
                yield after


def _next(known: Overhead, report: AgentReport, count: int, elapsed: float) -> Overhead | None:
    """Return the state after one reading, the same object while nothing changes; None if its parts cannot be known."""
    held = held_by_device(report.pools).get(known.device_uuid, 0)
    new = tuple(name for name in report.components if name in COMPONENTS and name not in known.components)
    if new:
        known = replace(known, components=known.components + new, unsettled=known.unsettled + new, changed=elapsed)
    if (count, held) != (known.counted_bytes, known.held_bytes):
        return replace(known, counted_bytes=count, held_bytes=held)
    size = count - held
    if size < 0 or (known.unsettled and elapsed - known.changed < SETTLING_SECONDS):
        return known
    if not known.parts:
        if elapsed - known.began > FIRST_SECONDS:
            return None
        return replace(known, parts=((CONTEXT, size),), rest_bytes=size, unsettled=())
    if not known.unsettled:
        return known if size == known.rest_bytes else replace(known, rest_bytes=size)
    name = " and ".join(COMPONENTS[each] for each in known.unsettled).replace(" and with ", " and ")
    part = (name, max(0, size - known.rest_bytes))
    return replace(known, parts=(*known.parts, part), rest_bytes=size, unsettled=())


def parts(overhead: Overhead | None, size: int | None) -> tuple[tuple[str, int], ...] | None:
    """Return names and bytes of the parts of an overhead of ``size`` bytes, which are their sum; None if unknown."""
    if overhead is None or size is None or not overhead.parts:
        return None
    other = size - sum(part for _, part in overhead.parts)
    return (*overhead.parts, ("other", other)) if other >= 0 else None
