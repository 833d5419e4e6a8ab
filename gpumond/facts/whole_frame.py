"""A complete frame as the API states it, and as its readers check it."""

from __future__ import annotations

from dataclasses import dataclass

from gpumond.facts.frame import Alert, Ledger, Silence, Verdict
from gpumond.facts.quota import EffectiveQuota, QueuedRequest
from gpumond.facts.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHolding:
    """One process on one device: the driver's values, and its shares. Unknown values are null.

    `unmapped_bytes` are counted by allocators while their pages are released (sleep mode); they are not part of
    `used_bytes`. `overhead_parts` are names and bytes of the parts of the overhead. `limit_bytes` is the limit of its
    allocators, `quota` what its quotas require. `reserve_shortage_bytes` is the part of its reserve that it does not
    use and that is not free.
    """

    device_uuid: str
    pid: int
    start_ticks: int | None
    comm: str | None
    uid: int | None
    user: str | None
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


@dataclass(frozen=True, slots=True)
class StatedFault:
    """Failure to read a value, with its remedy."""

    source: str
    kind: str
    device_uuid: str | None
    detail: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StatedCondition:
    """Condition that limits the accuracy of a device's values, or of the machine's, with its remedy.

    `detail` states the process and the reason if the condition concerns one process.
    """

    device_uuid: str | None
    kind: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFrame:
    """One complete frame. Responses of the other routes are parts of a frame, and may differ by a tick.

    `host` is the name of the machine; in a pod that of its node, if `NODE_NAME` is set. `revision` is the commit of the
    daemon's build; `null` if it is unknown.
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
    processes: tuple[ProcessHolding, ...]
    faults: tuple[StatedFault, ...]
    conditions: tuple[StatedCondition, ...]
