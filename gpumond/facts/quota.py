"""Quotas: limits of the memory that processes hold on a device. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from gpumond.facts.suspension import MemoryHolder
from gpumond.facts.units import size_text

MAX_CACHED_QUOTAS = 4096


class QuotaAttributes(NamedTuple):
    """Attributes of a process that quotas match. Unknown attributes are empty, and match only the pattern ``*``."""

    workload: str = ""
    users: tuple[str, ...] = ("",)
    """Name and uid of its user."""
    container: str = ""
    namespace: str = ""

    def texts(self) -> tuple[tuple[str, ...], ...]:
        """Return the texts of each attribute, in the order of `Quota.patterns`."""
        return (self.workload,), self.users, (self.container,), (self.namespace,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of each process that matches, on each device. An attribute without a pattern (None) is not compared.

    ``soft_limit_bytes``: a process above it has an alert. ``limit_bytes`` is set in the program, if it allows this.
    ``reserve_bytes`` are kept available for the processes together. ``cgroup_limit_bytes`` is set in the driver, for
    all processes of each matching container together.
    """

    name: str
    workload: str | None = None
    user: str | None = None
    container: str | None = None
    namespace: str | None = None
    soft_limit_bytes: int | None = None
    limit_bytes: int | None = None
    reserve_bytes: int | None = None
    cgroup_limit_bytes: int | None = None

    def patterns(self) -> tuple[str | None, ...]:
        return self.workload, self.user, self.container, self.namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveQuota:
    """The limits of one process from all quotas that match it: the lowest of each limit, and the highest reserve.

    Each comes with the name of its quota, which is empty without one.
    """

    soft_limit_bytes: int | None = None
    soft_limit_quota: str = ""
    limit_bytes: int | None = None
    limit_quota: str = ""
    reserve_bytes: int | None = None
    reserve_quota: str = ""
    cgroup_limit_bytes: int | None = None
    cgroup_limit_quota: str = ""


NO_QUOTA = EffectiveQuota()


class QuotaTable:
    """Quotas in effect. Remembers the result for equal attributes, since each tick asks again for each process."""

    def __init__(self, quotas: Sequence[Quota] = ()) -> None:
        self.quotas = tuple(quotas)
        self._effective_quotas: dict[QuotaAttributes, EffectiveQuota] = {}

    def of(self, attributes: QuotaAttributes) -> EffectiveQuota:
        """Return the limits of one process, which are ``NO_QUOTA`` if no quota matches."""
        if not self.quotas:
            return NO_QUOTA
        if attributes not in self._effective_quotas:
            if len(self._effective_quotas) >= MAX_CACHED_QUOTAS:
                self._effective_quotas.clear()
            self._effective_quotas[attributes] = _effective(
                [quota for quota in self.quotas if _matches(quota, attributes)]
            )
        return self._effective_quotas[attributes]


def _effective(quotas: Sequence[Quota]) -> EffectiveQuota:
    def pick(limit: str, choose: Callable[..., tuple[int | None, str]]) -> tuple[int | None, str]:
        stated = ((getattr(quota, limit), quota.name) for quota in quotas)
        return choose((each for each in stated if each[0] is not None), default=(None, ""))

    (soft_limit, soft_limit_quota), (limit, limit_quota) = pick("soft_limit_bytes", min), pick("limit_bytes", min)
    reserve, reserve_quota = pick("reserve_bytes", max)
    cgroup_limit, cgroup_limit_quota = pick("cgroup_limit_bytes", min)
    effective = EffectiveQuota(
        soft_limit_bytes=soft_limit,
        soft_limit_quota=soft_limit_quota,
        limit_bytes=limit,
        limit_quota=limit_quota,
        reserve_bytes=reserve,
        reserve_quota=reserve_quota,
        cgroup_limit_bytes=cgroup_limit,
        cgroup_limit_quota=cgroup_limit_quota,
    )
    return NO_QUOTA if effective == NO_QUOTA else effective


def _matches(quota: Quota, attributes: QuotaAttributes) -> bool:
    pairs = zip(quota.patterns(), attributes.texts(), strict=True)
    return all(any(fnmatchcase(text, pattern) for text in texts) for pattern, texts in pairs if pattern is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request for device memory that is waiting.

    ``ahead``: number of requests for the device that come before it. ``available_bytes``: free memory that no earlier
    request and no reserve claims; None if unknown, negative if they claim more. ``claimed_bytes``: what of it is left
    out for earlier requests. ``missing_bytes``: what is missing even after the flushes that the daemon may do for it.
    ``user``: name or uid of the program's user; None if unknown. ``workload``: the name that the caller gave the
    program. ``since``: Unix time of the first frame in which it waits. ``holders``: who holds or is granted most of the
    device.
    """

    id: str
    device_uuid: str
    need_bytes: int
    available_bytes: int | None
    missing_bytes: int
    ahead: int
    user: str | None
    workload: str
    pid: int | None
    since: float
    holders: tuple[MemoryHolder, ...] = ()
    claimed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedRequest:
    """A granted request for device memory whose program doesn't hold all of it yet.

    ``unused_bytes``: what the program doesn't hold yet, and no other program is granted. ``user``, ``workload``,
    ``pid``: as in a QueuedRequest.
    """

    id: str
    device_uuid: str
    need_bytes: int
    unused_bytes: int
    user: str | None
    workload: str
    pid: int | None


def only_free_clause(unused: int, free: int | None) -> str:
    """Return how much of granted memory is free, as the end of a sentence; empty if all of it is, or if unknown."""
    return "" if free is None or free >= unused else f"; only {size_text(free)} is free"


ReclaimPolicy = Literal["user", "all", "off"]
"""The programs that are flushed for another: those of the same user, all, or none."""


AdmissionState = Literal["granted", "waiting", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFlush:
    """A program that is flushed or suspended for the request, and the bytes that this returns."""

    pid: int
    start_ticks: int | None
    workload: str
    reclaimable_bytes: int
    method: Literal["flush", "suspend"] = "flush"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRequest:
    """A request for device memory whose turn is before another's."""

    workload: str
    pid: int | None
    need_bytes: int


MAX_SHOWN_EARLIER = 3
"""Maximum number of earlier requests that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """State of a request for device memory.

    `ahead`: number of requests for the device that come before it; `behind`: the first three of them.
    `available_bytes`: free memory that no earlier request and no reserve claims; null if unknown, negative if they
    claim more. `claimed_bytes`: what of it is left out for earlier requests. `plan`: the flushes and suspensions after
    which the request fits; `missing_bytes`: what is missing even then.
    """

    id: str
    state: AdmissionState
    device_uuid: str
    device_index: int
    need_bytes: int
    ahead: int = 0
    behind: tuple[EarlierRequest, ...] = ()
    available_bytes: int | None = None
    claimed_bytes: int = 0
    missing_bytes: int = 0
    plan: tuple[PlannedFlush, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdmission:
    """One request for device memory.

    ``uid``: the user whose programs may be flushed for it; None for all users. ``pid`` and ``start_ticks``: the process
    that becomes the program, if it is known; ``program_uid``: its user. ``deadline``: the time at which the grant ends,
    of the monotonic clock; None while the request waits. ``whole``: it counts completely for other users too.
    ``workload``: the name that the caller states for the program.
    """

    id: str
    owner: str
    device_uuid: str
    device_index: int
    need_bytes: int
    grant_seconds: float
    uid: int | None
    pid: int | None
    start_ticks: int | None
    program_uid: int | None
    deadline: float | None
    whole: bool = False
    workload: str = ""

    @property
    def program(self) -> str:
        """Return the program that waits, such as ``train (pid 7)``."""
        pid = "" if self.pid is None else f"pid {self.pid}"
        return f"{self.workload} ({pid})" if self.workload and pid else self.workload or pid
