"""Recorder of a baseline: folds one frame after another into a Baseline. No I/O."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gpumond.baselines.statistics import MEASURES, Baseline, Blocks, Measured, WorkloadMeasures
from gpumond.model.frame import Frame, Line
from gpumond.model.pools import Receipt
from gpumond.model.process import ProcessKey

SHARES = {
    "live": ("live", "held"),
    "cached": ("reclaimable", "held"),
    "stranded": ("stranded", "held"),
    "overhead": ("overhead",),
    "opaque": (),
}
"""Measures to which a share of the ledger adds, besides ``used``."""

MAX_WORKLOADS = 64

Counter = tuple[ProcessKey, str, str]
"""Process, allocator and device UUID"""


@dataclass(slots=True)
class _Workload:
    seconds: float = 0.0
    blocks: dict[str, Blocks] = field(default_factory=lambda: defaultdict(Blocks))
    devices: set[str] = field(default_factory=set)
    first_retries: dict[Counter, int] = field(default_factory=dict)
    last_retries: dict[Counter, int] = field(default_factory=dict)
    flushes: int = 0


class BaselineRecorder:
    """Recording of ``for_seconds`` from the first frame on; ``workload`` None records all of them."""

    def __init__(self, name: str, for_seconds: float, workload: str | None = None) -> None:
        self.name, self.for_seconds, self.workload = name, for_seconds, workload
        self._began: tuple[float, float] | None = None
        self._now = 0.0
        self._workloads: dict[str, _Workload] = {}

    @property
    def complete(self) -> bool:
        return self._began is not None and self._now - self._began[1] >= self.for_seconds

    def add(self, frame: Frame) -> None:
        """Add a frame. A device that did not answer adds nothing, and neither does a workload on it."""
        elapsed = frame.snapshot.elapsed_seconds
        passed = elapsed - self._now if self._began else 0.0
        self._began = self._began or (frame.snapshot.taken_at, elapsed)
        self._now = elapsed
        unknown = {device.uuid for device in frame.snapshot.devices if device.missed}
        for name, lines in self._lines(frame).items():
            if name not in self._workloads and len(self._workloads) >= MAX_WORKLOADS:
                continue
            own = self._workloads.setdefault(name, _Workload())
            own.devices = {line.device_uuid for line in lines}
            if own.devices & unknown:
                continue
            own.seconds += passed
            for measure, value in _sums(lines).items():
                own.blocks[measure].add(value)
            busy = [
                device.sensors.gpu_utilization_ratio
                for device in frame.snapshot.devices
                if device.uuid in own.devices and device.sensors.gpu_utilization_ratio is not None
            ]
            if busy:
                own.blocks["utilization"].add(sum(busy) / len(busy))
        self._count_retries(frame)

    def flushed(self, receipt: Receipt) -> None:
        own = self._workloads.get(receipt.workload)
        if own is not None and receipt.outcome not in ("planned", "refused"):
            own.flushes += 1
            own.blocks["flush_yield"].add(float(receipt.released_bytes))

    def baseline(self) -> Baseline:
        """Return the baseline recorded so far."""
        at, since = self._began or (0.0, 0.0)
        workloads = tuple(_measures(name, self._workloads[name]) for name in sorted(self._workloads))
        return Baseline(self.name, self.workload, at, self.for_seconds, self._now - since, self.complete, workloads)

    def _lines(self, frame: Frame) -> dict[str, list[Line]]:
        """Return the lines by workload. A program without an agent is named by its command."""
        names = {
            (device.uuid, key): f"[{process.comm}]"
            for device in frame.snapshot.devices
            for key, process in device.processes_by_key.items()
            if process.comm
        }
        table: dict[str, list[Line]] = {}
        for line in frame.ledger.lines:
            name = line.workload or (names.get((line.device_uuid, line.process), "") if line.process else "")
            if name and line.share in SHARES and self.workload in (None, name):
                table.setdefault(name, []).append(line)
        return table

    def _count_retries(self, frame: Frame) -> None:
        for process, report in frame.snapshot.reports_by_process.items():
            own = self._workloads.get(report.workload)
            for pool in report.pools if own else ():
                if own is not None and pool.retries is not None:
                    counter = (process, pool.allocator, pool.device_uuid)
                    own.first_retries.setdefault(counter, pool.retries)
                    own.last_retries[counter] = pool.retries


def _sums(lines: list[Line]) -> dict[str, float]:
    """Return the sums of the measures; without an agent only ``used`` is known."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        sums["used"] += line.used_bytes
        for measure in SHARES[line.share]:
            sums[measure] += line.used_bytes
    return sums


def _measures(name: str, own: _Workload) -> WorkloadMeasures:
    measured = tuple(
        Measured(measure, distribution)
        for measure in MEASURES
        if measure in own.blocks and (distribution := own.blocks[measure].distribution()) is not None
    )
    retries = sum(last - own.first_retries[counter] for counter, last in own.last_retries.items())
    return WorkloadMeasures(name, own.seconds, measured, retries if own.last_retries else None, own.flushes)
