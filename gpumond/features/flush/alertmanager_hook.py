"""Flushes that Alertmanager requests: of the programs that the labels of an alert name on this machine.

Each start of an alert, identified by fingerprint and start, has one effect for each caller. The audit contains it, so
that this holds over a restart of the daemon. An alert whose flush could not start had no effect: its next notification
tries again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpumond.core import flush_each
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.flush import (
    FlushRequest,
    FlushResponse,
    Target,
    empty_receipt,
    labels_match_program,
    reclaimable_bytes,
)
from gpumond.facts.pools import Receipt
from gpumond.facts.program import TICKS_PER_SECOND, ProcessKey
from gpumond.facts.snapshot import AgentReport, Snapshot
from gpumond.facts.units import size_text
from gpumond.host.peer import rate_limit_name
from gpumond.store.audit import AuditEntry
from gpumond.store.store import Store

log = logging.getLogger(__name__)

FLUSH_ACTION, REFUSED_ACTION = "hook.flush", "hook.refused"
"""Actions in the audit log: an alert is about to flush; its flush could not start."""

MAX_FIRINGS_PER_CALLER = 1024
"""Maximum number of firings of alerts that are remembered for each caller."""

CLOCK_TOLERANCE_SECONDS = 5.0
"""Tolerated difference between the clocks of this machine and of the sender of an alert."""

PCI_UUID_PREFIX = "DRM-pci-"
"""Beginning of UUIDs that are PCI addresses, which devices of other machines can have, too."""

SUBJECT_LABELS = ("uuid", "pid", "workload")
"""Labels that name a device or programs; one of them is required."""

HookOutcome = Literal["flushed", "planned", "refused", "repeated", "skipped"]
FiringKey = tuple[str, float]
"""Fingerprint of an alert, and its start as Unix time"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookAlert:
    """One alert of a notification. ``starts_at``: Unix time at which it began to fire."""

    fingerprint: str
    starts_at: float
    firing: bool
    labels: Mapping[str, str]

    @property
    def firing_key(self) -> FiringKey:
        return self.fingerprint, self.starts_at

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookResult:
    """Result of one alert. ``pids``: pids of its programs; the receipts in the response say what each released."""

    fingerprint: str
    alert: str
    starts_at: float
    outcome: HookOutcome
    reason: str = ""
    pids: tuple[int, ...] = ()
    released_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HookAnswer:
    """Results of all alerts of a notification, and the receipts of the programs that were flushed or planned."""

    dry_run: bool
    alerts: tuple[HookResult, ...]
    receipts: tuple[Receipt, ...]
    released_bytes: int


class AlertmanagerHook:
    """Flushes for alerts, and remembers their starts.

    ``flush`` is the one path by which anything is flushed. ``machine_names`` returns the names of this machine in lower
    case, ``dry_run`` whether every request is a dry run.
    """

    def __init__(
        self,
        flush: Callable[[FlushRequest, str], Awaitable[FlushResponse]],
        store: Store,
        machine_names: Callable[[], Collection[str]],
        dry_run: Callable[[], bool],
    ) -> None:
        self._flush, self._store, self._machine_names, self._dry_run = flush, store, machine_names, dry_run
        self._handled: defaultdict[str, dict[FiringKey, None]] = defaultdict(dict)

    async def restore(self) -> None:
        """Load the starts that the previous daemon recorded in the audit."""
        try:
            entries = await self._store.audit_entries(include_users=False)
        except StoreUnavailable:
            return
        for entry in entries:
            firing_key = _firing_key_of(entry)
            if firing_key is not None and entry.action == FLUSH_ACTION:
                self._remember(rate_limit_name(entry.actor), firing_key)
            elif firing_key is not None:
                self._handled[rate_limit_name(entry.actor)].pop(firing_key, None)

    async def receive(
        self,
        alerts: Sequence[HookAlert],
        snapshot: Snapshot,
        caller: str,
        uid: int | None = None,
        dry_run: bool = False,
    ) -> HookAnswer:
        """Flush the programs of the alerts, each once, and return when all is finished.

        ``uid``: only programs of that user. Raises StoreUnavailable if nothing was started because it cannot be
        recorded.
        """
        dry_run = dry_run or self._dry_run()
        machine_names, handled = self._machine_names(), self._handled[rate_limit_name(caller)]
        results: dict[int, HookResult] = {}
        due: dict[int, tuple[AgentReport, ...]] = {}
        for index, alert in enumerate(alerts):
            if alert.firing and alert.firing_key in handled and not dry_run:
                results[index] = _result(alert, "repeated", "this firing of the alert has already been handled")
            elif isinstance(programs_or_reason := programs_of(alert, snapshot, machine_names, uid), str):
                results[index] = _result(alert, "skipped", programs_or_reason)
            else:
                due[index] = programs_or_reason
                if not dry_run:
                    self._remember(rate_limit_name(caller), alert.firing_key)
        if not dry_run:
            await self._record([(alerts[index], programs) for index, programs in due.items()], caller)
        receipts = await self._flush_all(due.values(), caller, dry_run)
        for index, programs in due.items():
            own_receipts = [receipt for program in programs for receipt in receipts[program.key]]
            results[index] = result = _flush_result(alerts[index], programs, own_receipts, dry_run)
            if result.outcome == "refused" and not dry_run:
                await self._forget(alerts[index], caller)
        all_receipts = tuple(receipt for own_receipts in receipts.values() for receipt in own_receipts)
        answer = HookAnswer(
            dry_run=dry_run,
            alerts=tuple(results[index] for index in range(len(alerts))),
            receipts=all_receipts,
            released_bytes=0 if dry_run else sum(receipt.released_bytes for receipt in all_receipts),
        )
        counts = Counter(result.outcome for result in answer.alerts)
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        log.info(
            "Alertmanager webhook from %s: %s; %s released", caller, summary or "none", size_text(answer.released_bytes)
        )
        return answer

    async def _record(self, due: Sequence[tuple[HookAlert, Sequence[AgentReport]]], caller: str) -> None:
        """Record the alerts before their flushes. Raises StoreUnavailable; then none of them is remembered."""
        try:
            for alert, programs in due:
                detail = {"alert": alert.name[:128], "pids": [program.pid for program in programs]}
                await self._store.audit(caller, FLUSH_ACTION, _audit_detail(alert) | detail)
        except StoreUnavailable:
            for alert, _ in due:
                self._handled[rate_limit_name(caller)].pop(alert.firing_key, None)
            raise

    async def _flush_all(
        self, program_groups: Collection[Sequence[AgentReport]], caller: str, dry_run: bool
    ) -> dict[ProcessKey, Sequence[Receipt]]:
        """Flush each program once, whatever number of alerts name it."""
        programs = {program.key: program for group in program_groups for program in group}
        requests = []
        for program in programs.values():
            target = Target(pid=program.pid, start_ticks=program.start_ticks, uid=program.uid)
            refusal = empty_receipt(program, "refused", "", caller, time.time())
            requests.append((FlushRequest(target=target, dry_run=dry_run, by_rule=True), refusal))
        return dict(zip(programs, await flush_each(self._flush, requests, caller), strict=True))

    def _remember(self, user: str, firing_key: FiringKey) -> None:
        handled = self._handled[user]
        handled[firing_key] = None
        while len(handled) > MAX_FIRINGS_PER_CALLER:
            del handled[next(iter(handled))]

    async def _forget(self, alert: HookAlert, caller: str) -> None:
        self._handled[rate_limit_name(caller)].pop(alert.firing_key, None)
        try:
            await self._store.audit(caller, REFUSED_ACTION, _audit_detail(alert))
        except StoreUnavailable:
            pass  # the store has logged it


def programs_of(
    alert: HookAlert, snapshot: Snapshot, machine_names: Collection[str], uid: int | None
) -> tuple[AgentReport, ...] | str:
    """Return the programs that an alert names and that can be flushed, or the reason if there is none."""
    labels = alert.labels
    if not alert.firing:
        return "the alert is resolved"
    if not any(name in labels for name in SUBJECT_LABELS):
        return f"the alert's labels contain neither a device nor a program: expected one of {', '.join(SUBJECT_LABELS)}"
    if elsewhere := _machine_mismatch(labels, snapshot, machine_names):
        return elsewhere
    programs = [each for each in snapshot.reports if uid in (None, each.uid) and labels_match_program(labels, each)]
    if not programs:
        return "no program with an agent has the alert's labels"
    if "pid" in labels and "start_ticks" not in labels:
        programs = [each for each in programs if not _started_after(each, alert, snapshot)]
        if not programs:
            return f"the process {labels['pid']} started after the alert: the pid was reused"
    programs = [each for each in programs if each.flush_policy != "never"]
    if not programs:
        return "the alert's programs don't allow flushes"
    programs = [each for each in programs if reclaimable_bytes(labels, each) > 0]
    return tuple(programs) or "the alert's programs have no memory that a flush would release"


def _machine_mismatch(labels: Mapping[str, str], snapshot: Snapshot, machine_names: Collection[str]) -> str:
    """Return the reason if the labels name another machine or none; empty if they name this one.

    A UUID identifies a device of this machine. Without one the label ``instance`` must name the machine, because pids
    and workloads of other machines are the same.
    """
    uuid, instance = labels.get("uuid"), labels.get("instance", "")
    if uuid is not None:
        pools = (pool.device_uuid for report in snapshot.reports for pool in report.pools)
        if uuid not in snapshot.devices_by_uuid and uuid not in pools:
            return f"no device of this machine has the UUID {uuid:.64}"
        if not uuid.startswith(PCI_UUID_PREFIX):
            return ""
    if host_of(instance) in machine_names:
        return ""
    if not instance:
        return "the alert needs the label `instance` with this machine's name"
    quoted = f"{instance!r:.66}"
    return f"the alert's label instance is {quoted}, not a known name of this machine; if it is one, add it to `hosts`"


def host_of(instance: str) -> str:
    """Return the host of an instance, such as ``node7:9917`` or ``[::1]:9917``, in lower case."""
    host, colon, port = instance.rpartition(":")
    host_text = host if colon and port.isdigit() and (":" not in host or host.endswith("]")) else instance
    return host_text.strip("[]").lower()


def _started_after(program: AgentReport, alert: HookAlert, snapshot: Snapshot) -> bool:
    """Return True if the program is known to have started after the alert: the alert is of another process."""
    if snapshot.uptime_seconds is None or program.start_ticks is None:
        return False
    started_at = snapshot.taken_at - snapshot.uptime_seconds + program.start_ticks / TICKS_PER_SECOND
    return started_at > alert.starts_at + CLOCK_TOLERANCE_SECONDS


def _result(
    alert: HookAlert,
    outcome: HookOutcome,
    reason: str = "",
    programs: Sequence[AgentReport] = (),
    released_bytes: int = 0,
) -> HookResult:
    return HookResult(
        fingerprint=alert.fingerprint,
        alert=alert.name,
        starts_at=alert.starts_at,
        outcome=outcome,
        reason=reason,
        pids=tuple(program.pid for program in programs),
        released_bytes=released_bytes,
    )


def _flush_result(
    alert: HookAlert, programs: Sequence[AgentReport], receipts: Sequence[Receipt], dry_run: bool
) -> HookResult:
    if all(receipt.outcome == "refused" for receipt in receipts):
        reasons = dict.fromkeys(receipt.reason for receipt in receipts)
        return _result(alert, "refused", "; ".join(reasons), programs)
    if dry_run:
        return _result(alert, "planned", programs=programs)
    return _result(alert, "flushed", "", programs, sum(receipt.released_bytes for receipt in receipts))


def _audit_detail(alert: HookAlert) -> dict[str, Any]:
    return {"fingerprint": alert.fingerprint, "starts_at": alert.starts_at}


def _firing_key_of(entry: AuditEntry) -> FiringKey | None:
    """Return the start of an alert that an entry records; None for other entries and damaged ones."""
    if entry.action not in (FLUSH_ACTION, REFUSED_ACTION) or not isinstance(entry.detail, dict):
        return None
    fingerprint, starts_at = entry.detail.get("fingerprint"), entry.detail.get("starts_at")
    if isinstance(fingerprint, str) and isinstance(starts_at, (int, float)):
        return fingerprint, float(starts_at)
    return None
