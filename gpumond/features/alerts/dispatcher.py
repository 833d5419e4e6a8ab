"""The consequences of a frame's alerts: notifications, flushes by rules, and the state that survives a restart.

``decide`` computes them without an effect, so that the frame can show its alerts as receivers will see them;
``execute`` carries them out once the frame is the current one.

A rule's action waits its cooldown between two flushes and observes its limit per hour. A flush that released nothing,
or whose memory was allocated again by the time of the next one, doubles the wait, and its alert states this. All limits
are counted for each user separately: one user's programs do not affect the flushes of another's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from gpumond.config.settings import Settings
from gpumond.facts.alerts import (
    Action,
    Activities,
    Labels,
    Rule,
    ended,
    kept,
    resume,
    same_process,
)
from gpumond.facts.engines import EngineReading
from gpumond.facts.errors import NoSuchReceiver, StoreUnavailable
from gpumond.facts.flush import (
    FlushOutcome,
    FlushRequest,
    Target,
    concerns,
    empty_receipt,
    receipt_without_bytes,
    reclaimable_bytes,
)
from gpumond.facts.frame import Alert
from gpumond.facts.pools import ENGINE_STEP, Expected, Outcome, PoolUsage, Receipt
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, Snapshot
from gpumond.facts.suspension import SuspensionOutcome, SuspensionReceipt
from gpumond.facts.units import HOUR_SECONDS, duration, human
from gpumond.features.alerts.outbox import BACKOFF_SECONDS, Outbox
from gpumond.features.alerts.receivers import NotSent, ReceiverType
from gpumond.kernel import Flushes, Kernel, Part, Rules, Silencing, Suspends, Tick, flush_each
from gpumond.quantities.device import short_users
from gpumond.store.audit import AuditEntry
from gpumond.store.store import Store

MAX_WAIT_SECONDS = 24 * HOUR_SECONDS
REFILL_RATIO = 0.5
"""A flush is ineffective if the programs allocated this share of the released bytes again."""

ANNOTATION = "action"


Key = tuple[str, Labels, int | None]
"""Rule and labels of an alert, and the user whose programs are flushed; None in audits of earlier versions"""

Pool = tuple[ProcessKey, str, str]
"""Process, device and allocator"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOrder:
    """A flush of programs and serving engines of one user, for one alert."""

    alert: Alert
    action: Action
    uid: int
    programs: tuple[AgentReport, ...]
    refilled_flushes: tuple[tuple[Pool, int], ...] = ()
    """Refilled flushes that the programs' pools had counted before the flush."""
    engines: tuple[str, ...] = ()
    """Names of the serving engines."""

    @property
    def key(self) -> Key:
        return self.alert.rule, self.alert.labels, self.uid

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(report.pid for report in self.programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedBytes:
    """Bytes that a flush released from a pool and left in it, to evaluate its effect later."""

    process: ProcessKey
    device_uuid: str
    allocator: str
    held_bytes: int
    released_bytes: int
    refilled_flushes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTrack:
    """Flushes of an action for one alert and one user. ``attempts``: elapsed seconds of those of the last hour.

    ``process`` is that of the alert, if it has one.
    """

    attempts: tuple[float, ...] = ()
    failures: int = 0
    under_way: bool = False
    released: tuple[ReleasedBytes, ...] = ()
    note: str = ""
    process: ProcessKey | None = None

    def due_at(self, action: Action) -> float:
        if not self.attempts:
            return float("-inf")
        wait = action.cooldown_seconds * 2.0 ** min(self.failures, 30)
        return self.attempts[-1] + max(action.cooldown_seconds, min(wait, MAX_WAIT_SECONDS))


Tracks = Mapping[Key, ActionTrack]


def decide(
    rules: Iterable[Rule],
    alerts: Iterable[Alert],
    reports: Sequence[AgentReport],
    tracks: Tracks,
    elapsed: float,
    engines: Sequence[tuple[EngineReading, frozenset[str]]] = (),
    short_users: Mapping[str, frozenset[int]] = {},
) -> tuple[list[FlushOrder], Tracks]:
    """Return the flushes that are due now; their tracks are ``under_way`` until ``conclude``.

    ``engines``: each with the devices that its processes use. ``short_users``: by UUID, the users whose programs alone
    may be flushed by a rule on `wasted_ratio`, since nobody else ran short of memory.
    """
    active = {rule.name: rule for rule in rules if rule.action is not None}
    if not active:
        return [], tracks
    own = dict(tracks)
    orders: list[FlushOrder] = []
    for alert in alerts:
        rule = active.get(alert.rule)
        if rule is None or rule.action is None or alert.phase != "firing":
            continue
        action = rule.action
        among, concerned = _of_scope(rule, alert, reports, engines)
        programs: defaultdict[int, list[AgentReport]] = defaultdict(list)
        for report in _programs(alert, action, among):
            programs[report.uid].append(report)
        idle: defaultdict[int, list[str]] = defaultdict(list)
        for uid, name in _engines(alert, action, concerned):
            idle[uid].append(name)
        before = (uid for rule, labels, uid in own if (rule, labels) == (alert.rule, alert.labels) and uid is not None)
        uuid = dict(alert.labels).get("uuid", "") if rule.value == "wasted_ratio" else ""
        for uid in {*programs, *idle} - short_users.get(uuid, {*programs, *idle}):
            programs.pop(uid, None)
            idle.pop(uid, None)
        for uid in sorted({*programs, *idle, *before}):
            key = (alert.rule, alert.labels, uid)
            track = _with_effect(_of_process(own.get(key, ActionTrack()), alert), action, reports, elapsed)
            due = not track.under_way and elapsed >= track.due_at(action)
            if (
                (uid in programs or uid in idle)
                and due
                and _attempts(own, alert.rule, uid, elapsed) < action.max_per_hour
            ):
                orders.append(
                    FlushOrder(
                        alert=alert,
                        action=action,
                        uid=uid,
                        programs=tuple(programs[uid]),
                        refilled_flushes=_refilled_flushes(reports),
                        engines=tuple(idle[uid]),
                    )
                )
                attempts = (*_recent(track, elapsed), elapsed)
                track = replace(track, under_way=True, attempts=attempts, released=(), process=alert.process)
            if track != ActionTrack():
                own[key] = track
    return orders, own


def conclude(
    tracks: Tracks, order: FlushOrder, receipts: Sequence[Receipt], problem: str = "", asked: Sequence[str] = ()
) -> Tracks:
    """Return the tracks after a flush; ``problem`` is the reason if there was none, ``asked`` the results of requests
    to end."""
    track = tracks.get(order.key, ActionTrack())
    failed = not any(receipt.released_bytes > 0 for receipt in receipts) and not (order.action.dry_run and receipts)
    track = replace(
        track,
        under_way=False,
        failures=track.failures + 1 if failed else track.failures,
        released=tuple(_released(receipts, dict(order.refilled_flushes))),
    )
    note = "; ".join((_note(order, receipts, problem), *asked))
    if failed:
        note += f"; next attempt in {_wait(track, order.action)}"
    return {**tracks, order.key: replace(track, note=note)}


def remembered(attempts: Iterable[tuple[Key, float]], now: float) -> Tracks:
    """Return the tracks of a daemon that starts, so that a restart keeps the flushes of the last hour.

    ``attempts`` are unix seconds, oldest first.
    """
    tracks: dict[Key, ActionTrack] = {}
    for key, at in attempts:
        ago = max(0.0, now - at)
        if ago < HOUR_SECONDS:
            tracks[key] = ActionTrack(attempts=(*tracks.get(key, ActionTrack()).attempts, -ago))
    return tracks


def annotate(alerts: Iterable[Alert], tracks: Tracks) -> tuple[Alert, ...]:
    """Return the alerts, each with the results of its action as an annotation."""
    noted: defaultdict[tuple[str, Labels], list[ActionTrack]] = defaultdict(list)
    for (rule, labels, _), track in tracks.items():
        if track.note:
            noted[rule, labels].append(track)

    def annotated(alert: Alert) -> Alert:
        own = noted.get((alert.rule, alert.labels), ())
        notes = [track.note for track in own if same_process(track.process, alert.process)]
        return replace(alert, annotations=(*alert.annotations, (ANNOTATION, "; ".join(notes)))) if notes else alert

    return tuple(map(annotated, alerts))


def forget(tracks: Tracks, alerts: Iterable[Alert], elapsed: float) -> Tracks:
    """Return the tracks without those of alerts that ended before the longest wait."""
    active = {(alert.rule, alert.labels) for alert in alerts}
    return {
        key: track if key[:2] in active else replace(track, note="")
        for key, track in tracks.items()
        if key[:2] in active or track.under_way or (track.attempts and elapsed - track.attempts[-1] < MAX_WAIT_SECONDS)
    }


def _of_process(track: ActionTrack, alert: Alert) -> ActionTrack:
    """Return the track, or only its attempts if the pid of the alert's process is reused: the limits remain."""
    if track.under_way or same_process(track.process, alert.process):
        return track
    return ActionTrack(attempts=track.attempts)


def _with_effect(track: ActionTrack, action: Action, reports: Sequence[AgentReport], elapsed: float) -> ActionTrack:
    """Return the track with the effect of its last flush, once that is old enough."""
    if not track.released or track.under_way or elapsed < track.due_at(action):
        return track
    pools = {(report.key, pool.device_uuid, pool.allocator): pool for report in reports for pool in report.pools}
    released = sum(each.released_bytes for each in track.released)
    if sum(_taken(each, pools) for each in track.released) < REFILL_RATIO * released:
        return replace(track, failures=0, released=())
    track = replace(track, failures=track.failures + 1, released=())
    note = f"the programs reallocated the memory that the last flush released ({human(released)})"
    return replace(track, note=f"{note}; next attempt {_wait(track, action)} after that flush")


def _taken(each: ReleasedBytes, pools: Mapping[Pool, PoolUsage]) -> int:
    """Return the bytes that the program allocated again; all of them if its agent observed it, even if they are
    free now.
    """
    pool = pools.get((each.process, each.device_uuid, each.allocator))
    if pool is None:
        return 0
    if pool.refilled_flushes > each.refilled_flushes:
        return each.released_bytes
    return max(0, min(each.released_bytes, pool.held_bytes - each.held_bytes))


def _refilled_flushes(reports: Iterable[AgentReport]) -> tuple[tuple[Pool, int], ...]:
    pools = ((report.key, pool) for report in reports for pool in report.pools)
    return tuple(
        ((key, pool.device_uuid, pool.allocator), pool.refilled_flushes) for key, pool in pools if pool.refilled_flushes
    )


def _of_scope(
    rule: Rule, alert: Alert, reports: Sequence[AgentReport], engines: Sequence[tuple[EngineReading, frozenset[str]]]
) -> tuple[Sequence[AgentReport], Sequence[tuple[EngineReading, frozenset[str]]]]:
    """Return the programs and engines that a rule of this scope may flush: with scope engine, the alert's only."""
    if rule.scope != "engine":
        return reports, engines
    name = dict(alert.labels).get("engine")
    own = [each for each in engines if each[0].name == name]
    keys = {process.key for engine, _ in own for process in engine.processes}
    return [report for report in reports if report.key in keys], own


def _programs(alert: Alert, action: Action, reports: Sequence[AgentReport]) -> Iterator[AgentReport]:
    """Yield the programs that the alert concerns, that may be flushed, and that have enough reclaimable memory."""
    labels = dict(alert.labels)
    for report in reports if action.program_steps or action.suspend else ():
        suspends = action.suspend and report.may_suspend  # once it is idle
        flushes = bool(action.program_steps) and report.flush_policy != "never"
        if not (suspends or flushes) or not any(fnmatchcase(report.workload, glob) for glob in action.workloads):
            continue
        if not concerns(labels, report) or alert.process not in (None, report.key):
            continue
        least = 0 if action.request_end else max(1, action.min_reclaimable_bytes)
        if suspends or reclaimable_bytes(labels, report) >= least:
            yield report


def _engines(
    alert: Alert, action: Action, engines: Sequence[tuple[EngineReading, frozenset[str]]]
) -> Iterator[tuple[int, str]]:
    """Yield user and name of the engines that the alert concerns, that may be flushed, and that are idle enough."""
    labels = dict(alert.labels)
    for engine, devices in engines if ENGINE_STEP in action.steps else ():
        idle = engine.idle_seconds is not None and engine.idle_seconds >= action.only_idle_for_seconds
        if not engine.methods or not engine.processes or engine.sleeping or engine.uid is None or not idle:
            continue
        keys = [process.key for process in engine.processes]
        if "pid" in labels and labels["pid"] not in {str(key.pid) for key in keys}:
            continue
        if alert.process is not None and alert.process not in keys:
            continue
        if "uuid" in labels and labels["uuid"] not in devices:
            continue
        if "pid" not in labels and labels.get("workload", "") not in ("", engine.name):
            continue
        if labels.get("uid", str(engine.uid)) != str(engine.uid):
            continue
        if any(fnmatchcase(engine.name, glob) for glob in action.workloads):
            yield engine.uid, engine.name


def _recent(track: ActionTrack, elapsed: float) -> tuple[float, ...]:
    return tuple(at for at in track.attempts if elapsed - at < HOUR_SECONDS)


def _attempts(tracks: Tracks, rule: str, uid: int, elapsed: float) -> int:
    own = (track for (name, _, user), track in tracks.items() if (name, user) == (rule, uid))
    return sum(len(_recent(track, elapsed)) for track in own)


def _released(receipts: Iterable[Receipt], refilled_flushes: Mapping[Pool, int]) -> Iterator[ReleasedBytes]:
    for receipt in receipts:
        if receipt.released_bytes > 0 and receipt.after and receipt.device_uuid and receipt.allocator:
            process = ProcessKey(receipt.pid, receipt.start_ticks)
            yield ReleasedBytes(
                process=process,
                device_uuid=receipt.device_uuid,
                allocator=receipt.allocator,
                held_bytes=receipt.after.held_bytes,
                released_bytes=receipt.released_bytes,
                refilled_flushes=refilled_flushes.get((process, receipt.device_uuid, receipt.allocator), 0),
            )


def _wait(track: ActionTrack, action: Action) -> str:
    return duration(track.due_at(action) - track.attempts[-1] if track.attempts else action.cooldown_seconds)


def _note(order: FlushOrder, receipts: Sequence[Receipt], problem: str) -> str:
    if not receipts:
        return f"no flush: {problem or 'no receipt'}"
    programs = ", ".join(dict.fromkeys(receipt.workload or f"pid {receipt.pid}" for receipt in receipts))
    expected = human(sum(receipt.expected.likely for receipt in receipts if receipt.expected))
    if order.action.dry_run:
        return f"dry run: {_noun(order)} of {programs} would return {expected}"
    released = sum(max(0, receipt.released_bytes) for receipt in receipts)
    if released > 0:
        done = "suspended" if order.action.suspend else "flushed"
        return f"{done} {programs}: {human(released)} released of {expected} expected"
    reasons = "; ".join(dict.fromkeys(f"{each.outcome}: {each.reason}".rstrip(": ") for each in receipts))
    return f"{_noun(order)} of {programs} released nothing ({reasons})"


def _noun(order: FlushOrder) -> str:
    return "a suspension" if order.action.suspend else "a flush"


ACTION = "action"
"""The audit's action of a rule that is about to flush."""

SUSPENSION_OUTCOMES: Mapping[SuspensionOutcome, Outcome] = {
    "suspended": "freed",
    "resumed": "nothing",
    "planned": "planned",
    "refused": "refused",
    "gone": "gone",
    "failed": "failed",
    "timeout": "timeout",
}

PAST_ALERTS = 1000
"""Kept in memory for the API; the store keeps more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The consequences of one frame's alerts, before any of them takes effect."""

    alerts: tuple[Alert, ...]
    """As the frame shows them: annotated with what rules have done."""
    firing: tuple[Alert, ...]
    """As receivers see them. An alert that resolved during its flush is included until its receipts are there."""
    resolved: tuple[Alert, ...]
    """Those whose flushes, if any, are complete."""
    incomplete: Mapping[Labels, Alert]
    """Alerts that resolved while a flush for them is in progress."""
    changed: Mapping[Labels, Alert]
    """Alerts with new annotations."""
    orders: tuple[FlushOrder, ...]
    tracks: Tracks
    activities: Mapping[str, Activities]


class AlertDispatcher:
    """Notifies, flushes for rules, and keeps alerts over a restart.

    ``flush`` is the one path by which anything is flushed; ``began`` is the monotonic time of elapsed 0.
    ``request_end`` asks a program to end, and returns the reason if it did not. ``suspend`` suspends one, or plans it.
    ``past`` are resolved alerts, newest last, annotated with what rules did.
    """

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        flush: Callable[[FlushRequest, str], Awaitable[FlushOutcome]],
        began: float,
        request_end: Callable[[AgentReport, str], Awaitable[str]] | None = None,
        suspend: Callable[[AgentReport, str, bool], Awaitable[SuspensionReceipt]] | None = None,
    ) -> None:
        self._request_end, self._suspend = request_end, suspend
        self._store, self._outbox, self._flush, self._began = store, outbox, flush, began
        self.past: deque[Alert] = deque(maxlen=PAST_ALERTS)
        self._ended: dict[Labels, Alert] = {}
        self._unkept: deque[Alert] = deque(maxlen=PAST_ALERTS)
        self._tracks: Tracks = {}
        self._changed: dict[Labels, Alert] = {}
        self._flushing: dict[Key, Alert] = {}
        self._kept: object = None
        self._flushes: set[asyncio.Future[None]] = set()
        self._writes: set[asyncio.Future[None]] = set()

    async def resume(self) -> Mapping[str, Activities]:
        """Load the alerts, and the attempts of rules to flush, that the previous daemon stored."""
        try:
            alerts, alive = await self._store.kept()
            entries = await self._store.audit_entries(users=False)
            self.past.extend(await self._store.past_alerts())
        except StoreUnavailable:
            return {}
        attempts = (_attempt(entry) for entry in entries if entry.action == ACTION)
        self._tracks = remembered([attempt for attempt in attempts if attempt], time.time())
        activities = resume(alerts, alive, time.time())
        if alive is not None and not activities:
            self._end(ended(each.alert, alive.at) for each in alerts if each.alert.phase == "firing")
        return activities

    def decide(
        self,
        rules: Sequence[Rule],
        alerts: Sequence[Alert],
        snapshot: Snapshot,
        activities: Mapping[str, Activities],
        resolved: Sequence[Alert] = (),
        short_users: Mapping[str, frozenset[int]] = {},
    ) -> Dispatch:
        """Return the consequences of one frame's alerts. Changes nothing: ``execute`` does. ``short_users``: as in
        the function `decide`.
        """
        elapsed = snapshot.elapsed_seconds
        orders, tracks = decide(
            rules, alerts, snapshot.reports, self._tracks, elapsed, snapshot.engine_devices, short_users
        )
        flushing = {alert.labels: alert for alert in self._flushing.values()}
        ended = {**self._ended, **{alert.labels: alert for alert in resolved}}
        complete = annotate([alert for labels, alert in ended.items() if labels not in flushing], tracks)
        tracks = forget(tracks, alerts, elapsed)
        alerts = annotate(alerts, tracks)
        awaiting = set(flushing) - {alert.labels for alert in alerts}
        return Dispatch(
            alerts=alerts,
            firing=(*alerts, *(flushing[labels] for labels in awaiting)),
            resolved=complete,
            incomplete={labels: alert for labels, alert in ended.items() if labels in flushing},
            changed={**self._changed, **{alert.labels: alert for alert in complete}},
            orders=tuple(orders),
            tracks=tracks,
            activities=activities,
        )

    def execute(self, dispatch: Dispatch) -> None:
        """Queue notifications, start flushes and store the state of alerts; waits for none of it.

        ``dispatch`` is the last result of ``decide``, and nothing else has run on the event loop since.
        """
        self._tracks, self._ended, self._changed = dispatch.tracks, dict(dispatch.incomplete), {}
        self._end(dispatch.resolved)
        for order in dispatch.orders:
            self._start(self._carry_out(order), self._flushes)
        notices = self._outbox.put(dispatch.firing, dispatch.changed)
        state = frozenset(
            (labels, each.alert.phase, each.active_elapsed, each.cleared_elapsed, each.alert.labels)
            for active in dispatch.activities.values()
            for labels, each in active.items()
        )
        if (notices or self._unkept or state != self._kept) and self._store.writable:
            over = tuple(self._unkept)
            self._unkept.clear()
            self._kept = state
            keeping = self._store.keep(kept(dispatch.activities, self._began), notices, over)
            self._start(self._keep(keeping, over), self._writes)

    async def close(self) -> None:
        """Cancel the flushes of rules, which then write their audit entries, and wait for these and other writes."""
        for task in self._flushes:
            task.cancel()
        await asyncio.gather(*self._flushes, *self._writes, return_exceptions=True)

    async def _keep(self, keeping: Awaitable[None], over: Sequence[Alert]) -> None:
        try:
            await keeping
        except StoreUnavailable:
            self._kept = None  # stored again when the store is writable
            self._unkept.extendleft(reversed(over))

    def _end(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            self.past.append(alert)
            self._unkept.append(alert)

    async def _carry_out(self, order: FlushOrder) -> None:
        actor, problem = f"rule:{order.alert.rule}", ""
        receipts: list[Receipt] = []
        asked: list[str] = []
        self._flushing[order.key] = order.alert
        try:
            if not order.action.dry_run:
                detail = {"labels": order.alert.labels, "uid": order.uid, "pids": order.pids}
                engines = {"engines": order.engines} if order.engines else {}
                await self._store.audit(actor, ACTION, detail | engines)
            flushed = await flush_each(self._flush, _requests(order, actor), actor)
            receipts += (receipt for each in flushed for receipt in each)
            receipts += [await self._suspend_one(order, each, actor) for each in order.programs if order.action.suspend]
            if order.action.request_end and not order.action.dry_run:
                asked += [await self._ask_to_end(program, actor) for program in order.programs]
        except StoreUnavailable as error:
            problem = str(error)
        finally:
            del self._flushing[order.key]
            self._tracks = conclude(self._tracks, order, receipts, problem, asked)
            if order.alert.labels not in {alert.labels for alert in self._flushing.values()}:
                (self._changed[order.alert.labels],) = annotate([order.alert], self._tracks)

    async def _suspend_one(self, order: FlushOrder, program: AgentReport, actor: str) -> Receipt:
        """Suspend one program after its flush. The receipt is in the form of a flush, for the rule's limits."""
        if self._suspend is None:
            return empty_receipt(program, "refused", "suspensions aren't available", actor, time.time())
        found = await self._suspend(program, actor, order.action.dry_run)
        size = found.expected_bytes
        return replace(
            empty_receipt(program, SUSPENSION_OUTCOMES[found.outcome], found.reason, actor, found.started_at),
            expected=None if size is None else Expected(size, size, size),
            released_bytes=found.released_bytes or 0,
            driver_released_bytes=found.released_bytes,
            duration_seconds=found.duration_seconds,
        )

    async def _ask_to_end(self, program: AgentReport, actor: str) -> str:
        """Ask a program to end, and return a sentence about it. Raises StoreUnavailable."""
        named = f"{program.workload or 'the program'} (pid {program.pid})"
        reason = await self._request_end(program, actor) if self._request_end else "requests to end aren't available"
        return f"{named} wasn't asked to end: {reason}" if reason else f"{named} was asked to end"

    def _start(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Future[None]]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _requests(order: FlushOrder, actor: str) -> Iterator[tuple[FlushRequest, Receipt]]:
    """Yield the request for each program and engine, and its receipt if it is refused."""
    action, now = order.action, time.time()
    for program in order.programs:
        if not action.program_steps or program.flush_policy == "never":
            continue
        target = Target(pid=program.pid, start_ticks=program.start_ticks, uid=order.uid)
        request = FlushRequest(target=target, steps=action.program_steps, dry_run=action.dry_run, by_rule=True)
        yield request, empty_receipt(program, "refused", "", actor, now)
    for name in order.engines:
        request = FlushRequest(
            target=Target(workload=name, uid=order.uid),
            steps=(ENGINE_STEP,),
            min_reclaimable_bytes=action.min_reclaimable_bytes,
            dry_run=action.dry_run,
            by_rule=True,
        )
        yield request, receipt_without_bytes(ProcessKey(0, None), name, "refused", "", actor, now)


def _attempt(entry: AuditEntry) -> tuple[Key, float] | None:
    """Return key and time of an attempt to flush; None if the entry is damaged and does not name its alert."""
    try:
        labels = tuple((str(name), str(text)) for name, text in entry.detail["labels"])
        uid = entry.detail.get("uid")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return (entry.actor.removeprefix("rule:"), labels, uid if isinstance(uid, int) else None), entry.at


log = logging.getLogger(__name__)

RULE = "gpumond-test"
"""The rule that a test message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTest:
    """The answer of a receiver to a test message.

    `status` is its HTTP status, null without an answer or for a receiver without HTTP. `reason` is one of the reasons
    of `gpumond_notifications_failed_total`, empty if the receiver accepted the message; `detail` states the error.
    """

    receiver: str
    accepted: bool
    status: int | None
    reason: str
    detail: str
    duration_seconds: float


async def send_test(receiver: ReceiverType, requested_by: str) -> ReceiverTest:
    """Send one alert that is marked as a test, as a notification is sent. The address is never in the result."""
    now, began = time.time(), time.monotonic()
    alert = Alert(
        rule=RULE,
        phase="firing",
        labels=(("alertname", RULE), ("severity", "info"), ("test", "true")),
        annotations=(("summary", f"Test message from gpumond, requested by {requested_by}. No action is required."),),
        value=1.0,
        active_at=now,
        fired_at=now,
    )
    status, reason, detail = None, "", ""
    try:
        status = await receiver.send((alert,), ())
    except NotSent as error:
        status, reason, detail = error.status, error.reason, str(error)
    except Exception as error:
        log.exception("receiver %s", receiver.name)
        reason, detail = "error", type(error).__name__
    return ReceiverTest(
        receiver=receiver.name,
        accepted=not reason,
        status=status,
        reason=reason,
        detail=detail,
        duration_seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class Receivers:
    """Where notifications are sent. ``backoff_seconds``: the shortest and the longest pause before another attempt."""

    of: Callable[[Settings], Sequence[ReceiverType]] = lambda settings: settings.receivers
    backoff_seconds: tuple[float, float] = BACKOFF_SECONDS


class AlertsPart(Part):
    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._store = kernel, kernel.store
        self._receivers = kernel.find(Receivers) or Receivers()
        self._rules = kernel.get(Rules)
        silences = kernel.find(Silencing)
        self.outbox = Outbox(
            self._receivers.of(kernel.settings),
            kernel.store,
            kernel.telemetry,
            wants=self._receives,
            silenced=lambda alert: silences is not None and bool(silences.silencing(alert)),
            backoff_seconds=self._receivers.backoff_seconds,
        )
        self.dispatcher = AlertDispatcher(
            kernel.store, self.outbox, kernel.get(Flushes).flush, kernel.began, self._request_end, self._suspend
        )
        self._dispatch: Dispatch | None = None
        kernel.provide(AlertsPart, self)

    async def load(self) -> Sequence[str]:
        await self.dispatcher.resume()
        await self.outbox.open()
        return ()

    def conclude(self, tick: Tick) -> Tick:
        snapshot, reclaim = tick.frame.snapshot, self._kernel.settings.reclaim
        users = {} if reclaim == "all" else short_users(tick.window, snapshot)
        self._dispatch = self.dispatcher.decide(
            self._rules.rules, tick.frame.alerts, snapshot, tick.activities, tick.resolved, users
        )
        return replace(tick, frame=replace(tick.frame, alerts=self._dispatch.alerts))

    def act(self, tick: Tick) -> None:
        assert self._dispatch is not None
        self.dispatcher.execute(self._dispatch)

    async def configure(self, settings: Settings) -> None:
        await self.outbox.configure(self._receivers.of(settings))

    async def close(self) -> None:
        await self.dispatcher.close()
        await self.outbox.close()

    def past(self) -> Sequence[Alert]:
        """Return the alerts that have been resolved, newest last."""
        return tuple(self.dispatcher.past)

    async def test_receiver(self, name: str, requested_by: str) -> ReceiverTest:
        """Send a test message to a receiver, without its queue. Raises NoSuchReceiver, StoreUnavailable."""
        receivers = {receiver.name: receiver for receiver in self._receivers.of(self._kernel.settings)}
        if name not in receivers:
            raise NoSuchReceiver(f"no receiver has the name {name}; the receivers are {', '.join(receivers) or 'none'}")
        await self._store.audit(requested_by, "receiver.test", {"receiver": name})
        return await send_test(receivers[name], requested_by)

    def _receives(self, receiver: str, rule: str) -> bool:
        """An alert of a rule whose receivers are all unknown is sent to every receiver."""
        named = next((each.receivers for each in self._rules.rules if each.name == rule), ())
        return receiver in named or not set(named) & set(self._kernel.settings.receiver_names())

    async def _suspend(self, report: AgentReport, requested_by: str, dry_run: bool) -> SuspensionReceipt:
        return await self._kernel.get(Suspends).suspend_idle(report.key, requested_by, dry_run)

    async def _request_end(self, report: AgentReport, requested_by: str) -> str:
        """Ask a program to end. Return the reason if it was not asked. Raises StoreUnavailable."""
        if not self._kernel.settings.allow_end_requests:
            return "the configuration doesn't allow it (allow_end_requests)"
        return await self._kernel.requests.request_end(report, requested_by)
