"""The result of a tick: the snapshot and the conclusions from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from gpumond.facts.errors import AmbiguousDevice, NoSuchDevice
from gpumond.facts.fast_dataclass import fast_dataclass
from gpumond.facts.pools import FlushPolicy
from gpumond.facts.program import ProcessKey, process_key
from gpumond.facts.quota import EffectiveQuota, GrantedRequest, QueuedRequest
from gpumond.facts.shares import Share
from gpumond.facts.snapshot import DeviceReading, Owner, ProcessUsage, Snapshot
from gpumond.facts.verdicts import VerdictName

Phase = Literal["pending", "firing", "resolved"]


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
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

    lines: tuple[LedgerLine, ...] = ()
    overcounts: tuple[Overcount, ...] = ()


@dataclass(frozen=True, slots=True)
class RuledOutCause:
    """Another explanation of a leak (a kind of verdict, ``load`` or ``larger-allocations``), and what rules it out."""

    kind: str
    reason: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthLine:
    """The line through a leak's ``points`` (Unix time, bytes). Its value at the Unix time ``at`` is ``level_bytes``.

    The low and the high slope are 90% confidence limits, if at most successive points are correlated. ``band_bytes``:
    two standard deviations of the points from the line. ``full_at``: the Unix time at which the device is full at this
    slope; the earliest and the latest time follow from the limits and the band. They are None if the size is unknown or
    that slope doesn't rise. ``device_uuid`` and ``pid``: the program that the points describe, if the verdict covers a
    group and another program will fill its device first.
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
    ruled_out: tuple[RuledOutCause, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The diagnosis of a memory curve, in one sentence. Without a process, it's about the device as a whole.

    ``since`` is the Unix time of the onset. ``form`` of a leak: linear, stairs or load-proportional. ``fit``: a leak's
    points and their line. ``retained_by``: the lines or the scope that retain the growing memory; empty if unknown.
    """

    device_uuid: str
    pid: int | None
    start_ticks: int | None
    kind: VerdictName
    since: float
    evidence: tuple[tuple[str, float], ...] = ()
    time_to_full_seconds: float | None = None
    summary: str = ""
    form: str = ""
    fit: GrowthLine | None = None
    retained_by: str = ""

    @property
    def process(self) -> ProcessKey | None:
        return process_key(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A rule that is breached for one subject. ``labels`` identify the alert; ``annotations`` don't.

    ``pid`` and ``start_ticks`` are None unless the subject is a process or a pool: the same labels with another process
    are another alert. ``active_at`` is the time of the first breach; ``fired_at`` and ``resolved_at`` are None until
    the alert fires and resolves. ``silenced_by``: IDs of the silences that keep it from being sent.
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
    """The silences that have not ended."""
    queue: tuple[QueuedRequest, ...] = ()
    """Requests for memory that wait, the next one of each device first."""
    grants: tuple[GrantedRequest, ...] = ()
    """Requests whose memory is granted, and not all held yet."""
    owners: Mapping[Owner, float] | None = None
    """Owners with series of their own, and the elapsed seconds at which each last had a program; None: all have."""

    @cached_property
    def processes_by_size(self) -> Sequence[tuple[DeviceReading, Sequence[ProcessUsage]]]:
        """Each device with its listed processes, the largest first."""
        return [
            (device, sorted(device.processes or (), key=lambda process: -(process.used_bytes or 0)))
            for device in self.snapshot.devices
        ]

    @cached_property
    def share_bytes(self) -> Mapping[tuple[str, Share], int]:
        """Bytes by device and share."""
        sums: dict[tuple[str, Share], int] = {}
        for line in self.ledger.lines:
            key = line.device_uuid, line.share
            sums[key] = sums.get(key, 0) + line.used_bytes
        return sums


Operator = Literal["=", "!=", "=~", "!~"]
SilenceState = Literal["pending", "active", "ended"]

OPERATORS: tuple[Operator, ...] = get_args(Operator)


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label of an alert. A label that the alert doesn't have counts as empty.

    With `=~` and `!~`, `value` is a regular expression, which matches the whole text.
    """

    name: str
    operator: Operator
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Alerts that all ``matchers`` match aren't sent from ``starts_at`` until ``ends_at`` (Unix seconds).

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

    def state(self, now: float) -> SilenceState:
        return "pending" if now < self.starts_at else "active" if now < self.ends_at else "ended"


DEVICE_NAME_FORMS = "an index, a UUID or its prefix, or a PCI address"
MAX_LISTED_DEVICES = 16
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", re.IGNORECASE)


def find_device_uuid(name: str, devices: Sequence[DeviceReading], others: Iterable[str] = ()) -> str:
    """Return the UUID of the device with that name.

    ``others`` are UUIDs that the driver does not list, from agents or from the history. Raises NoSuchDevice and
    AmbiguousDevice, whose messages list the devices.
    """
    uuids = dict.fromkeys((*(device.uuid for device in devices), *others))
    if name in uuids:
        return name
    name = re.sub(r"(?i)^gpu\s+(?=\d+$)", "", name)  # as every view names it
    # A partition has the index and the address of its parent; the name then means the parent.
    candidates = [device for device in devices if device.parent_uuid is None] or devices
    matches = [device.uuid for device in candidates if name in (str(device.index), device.pci_bus_id)]
    if not matches and (address := _pci_address(name)):
        matches = [device.uuid for device in candidates if _pci_address(device.pci_bus_id) == address]
    if not matches and name:
        matches = [uuid for uuid in uuids if uuid.lower().startswith(name.lower())]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise AmbiguousDevice(
            f"GPU {name!r:.128} is ambiguous: {_device_list_text(devices, matches)}; specify more of the UUID"
        )
    listed_devices = f"GPUs on this machine: {_device_list_text(devices, uuids)}" if uuids else "no GPU is known"
    raise NoSuchDevice(f"no GPU {name!r:.128}; {listed_devices}; expected {DEVICE_NAME_FORMS}")


def _pci_address(text: str) -> tuple[int, ...] | None:
    match = _PCI_ADDRESS.fullmatch(text)
    return None if match is None else tuple(int(part or "0", 16) for part in match.groups())


def _device_list_text(devices: Sequence[DeviceReading], uuids: Iterable[str]) -> str:
    indices = {device.uuid: device.index for device in devices}
    names = [f"{indices[uuid]} ({uuid})" if uuid in indices else uuid for uuid in uuids]
    ending = f" and {len(names) - MAX_LISTED_DEVICES} more" if len(names) > MAX_LISTED_DEVICES else ""
    return ", ".join(names[:MAX_LISTED_DEVICES]) + ending


def find_device_uuid_in_frame(
    name: str, frame: Frame | None, uid: int | None = None, others: Iterable[str] = ()
) -> str:
    """Return the device's UUID. With ``uid``, devices unknown to the driver are limited to those of that user's agents.

    Raises NoSuchDevice, AmbiguousDevice.
    """
    if frame is None:
        return find_device_uuid(name, (), others)
    reports = (report for report in frame.snapshot.reports if uid is None or report.uid == uid)
    pools = (pool.device_uuid for report in reports for pool in report.pools)
    return find_device_uuid(name, frame.snapshot.devices, (*pools, *others))


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHolding:
    """One process on one device: the driver's values, and its shares. Unknown values are null.

    `started_at` is the Unix time at which the process started. `command` is the program, with the script or module that
    it runs if it is a Python interpreter, and without other arguments. `unmapped_bytes` are counted by allocators while
    their pages are released (sleep mode); they aren't part of `used_bytes`. `overhead_parts` are names and bytes of the
    parts of the overhead. `limit_bytes` is its allocators' limit, and `quota` what its quotas require.
    `reserve_shortage_bytes` is the part of its reserve that it doesn't use and that isn't free. `flush_policy` is null
    without an agent.
    """

    device_uuid: str
    pid: int
    start_ticks: int | None
    started_at: float | None
    comm: str | None
    uid: int | None
    user: str | None
    command: str | None
    container: str | None
    container_name: str | None
    pod_name: str | None
    pod_namespace: str | None
    pod_uid: str | None
    unit: str | None
    slurm_job: str | None
    state: str | None
    utilization_ratio: float | None
    idle_seconds: float | None
    orphaned: bool | None
    workload: str
    kinds: tuple[str, ...]
    used_bytes: int | None
    live_bytes: int | None
    cached_bytes: int | None
    stranded_bytes: int | None
    overhead_bytes: int | None
    overhead_parts: tuple[tuple[str, int], ...] | None
    opaque_bytes: int | None
    unmapped_bytes: int | None
    limit_bytes: int | None
    quota: EffectiveQuota | None
    reserve_shortage_bytes: int | None
    flush_policy: FlushPolicy | None
    suspendable: bool


@dataclass(frozen=True, slots=True)
class FaultWithRemedy:
    """Failure to read a value, with its remedy."""

    source: str
    kind: str
    device_uuid: str | None
    detail: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ConditionWithRemedy:
    """Condition that limits the accuracy of a device's values, or of the machine's, with its remedy.

    `detail` states the process and the reason if the condition concerns one process.
    """

    device_uuid: str | None
    kind: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullFrame:
    """One complete frame. The other routes' responses are parts of a frame, and may differ by a tick.

    `host` is the machine's name; in a pod, it's the node's if `NODE_NAME` is set. `revision` is the commit of the
    daemon's build, `null` if unknown.
    """

    version: str
    revision: str | None
    host: str
    snapshot: Snapshot
    ledger: Ledger
    verdicts: tuple[Verdict, ...]
    alerts: tuple[Alert, ...]
    silences: tuple[Silence, ...]
    queue: tuple[QueuedRequest, ...] = ()
    grants: tuple[GrantedRequest, ...] = ()
    processes: tuple[ProcessHolding, ...]
    faults: tuple[FaultWithRemedy, ...]
    conditions: tuple[ConditionWithRemedy, ...]
