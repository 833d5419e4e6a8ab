"""The result of a tick: the snapshot and the conclusions from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from gpumond.facts.process import ProcessKey, process_key
from gpumond.facts.quota import QueuedRequest
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Snapshot
from gpumond.facts.verdicts import VerdictName

Share = Literal["live", "cached", "stranded", "overhead", "opaque", "unattributed"]

SHARES: tuple[Share, ...] = ("live", "cached", "stranded", "overhead", "opaque", "unattributed")

Phase = Literal["pending", "firing", "resolved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Bytes of one share on one device; without a process for ``unattributed``."""

    device_uuid: str
    share: Share
    used_bytes: int
    pid: int | None = None
    start_ticks: int | None = None
    workload: str = ""

    @property
    def process(self) -> ProcessKey | None:
        return process_key(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True)
class Overcount:
    """Bytes by which the lines of a device exceed its driver's count."""

    device_uuid: str
    overcount_bytes: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Owners of all memory. For each device, the sum of its lines is used + overcount; every line is >= 0."""

    lines: tuple[Line, ...] = ()
    overcounts: tuple[Overcount, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedKind:
    """Another explanation of a leak's points: a kind of verdict, ``load`` or ``larger-allocations``; and the value that
    refuses it.
    """

    kind: str
    reason: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Line through the ``points`` (unix time, bytes) of a leak. Its level is ``level_bytes`` at the unix time ``at``.

    Low and high limit the slope with 90 % confidence, if at most successive points are correlated. ``band_bytes``: two
    standard deviations of the points from the line. ``full_at``: the unix time at which the device is full at this
    slope; earliest and latest follow from the limits and the band. They are None without a known size, or if the limit
    does not rise. ``device_uuid`` and ``pid`` are those of the points if another program than the verdict's is the
    first of a group to fill its device.
    """

    points: tuple[tuple[float, float], ...]
    at: float
    level_bytes: float
    slope_bytes_per_second: float
    slope_low_bytes_per_second: float
    slope_high_bytes_per_second: float
    band_bytes: float
    full_at: float | None
    full_at_earliest: float | None
    full_at_latest: float | None
    device_uuid: str | None = None
    pid: int | None = None
    refused: tuple[RefusedKind, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Meaning of a curve, with a one-sentence summary. Without a process it concerns the device as a whole.

    ``since`` is the unix time of the onset. ``form`` of a leak: linear, stairs or load-proportional. ``fit``: the
    points of a leak and their line.
    """

    device_uuid: str
    pid: int | None
    start_ticks: int | None
    kind: VerdictName
    since: float
    evidence: tuple[tuple[str, float], ...] = ()
    time_to_oom_seconds: float | None = None
    summary: str = ""
    form: str = ""
    fit: Fit | None = None

    @property
    def process(self) -> ProcessKey | None:
        return process_key(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A rule that is breached for one subject. ``labels`` identify the alert; annotations do not.

    ``pid`` and ``start_ticks`` are those of the subject if it is a process or a pool, else None: the same labels with
    another process are another alert.
    ``active_at`` is the time of the first breach; ``fired_at`` and ``resolved_at`` are None before the alert fires and
    is resolved. ``silenced_by``: the ids of the silences that keep it from being sent.
    """

    rule: str
    phase: Phase
    labels: tuple[tuple[str, str], ...]
    annotations: tuple[tuple[str, str], ...]
    value: float
    active_at: float
    fired_at: float | None = None
    resolved_at: float | None = None
    pid: int | None = None
    start_ticks: int | None = None
    silenced_by: tuple[str, ...] = ()

    @property
    def process(self) -> ProcessKey | None:
        return process_key(self.pid, self.start_ticks)


@dataclass(frozen=True)  # without slots, for the cached property
class Frame:
    """The result of one tick: its facts and the conclusions from them."""

    snapshot: Snapshot
    ledger: Ledger
    verdicts: tuple[Verdict, ...] = ()
    alerts: tuple[Alert, ...] = ()
    silences: tuple[Silence, ...] = ()
    """Those that have not ended."""
    queue: tuple[QueuedRequest, ...] = ()
    """Requests for memory that wait, the next one of each device first."""

    @cached_property
    def processes_by_size(self) -> Sequence[tuple[DeviceReading, Sequence[ProcessUsage]]]:
        """Each device with its listed processes, the largest first."""
        return [
            (device, sorted(device.processes or (), key=lambda process: -(process.used_bytes or 0)))
            for device in self.snapshot.devices
        ]


Operator = Literal["=", "!=", "=~", "!~"]
State = Literal["pending", "active", "ended"]

OPERATORS: tuple[Operator, ...] = get_args(Operator)


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label of an alert. A label that the alert does not have is an empty text.

    With `=~` and `!~`, `value` is a regular expression, which matches the whole text.
    """

    name: str
    operator: Operator
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Alerts that all ``matchers`` match are not sent from ``starts_at`` until ``ends_at`` (unix seconds).

    ``author`` is the name that was given, ``created_by`` the authenticated caller.
    """

    id: str
    matchers: tuple[Matcher, ...]
    starts_at: float
    ends_at: float
    author: str
    reason: str
    created_at: float
    created_by: str

    def state(self, now: float) -> State:
        return "pending" if now < self.starts_at else "active" if now < self.ends_at else "ended"
