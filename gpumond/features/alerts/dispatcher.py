"""The consequences of a frame's alerts: notifications, flushes by rules, and the state that survives a restart.

``decide`` computes them without an effect, so the frame can show its alerts as receivers will see them;
``execute`` carries them out once the frame is the current one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpumond.config.settings import Settings
from gpumond.core import Core, FlushService, Part, RuleService, SilenceService, SuspendService, Tick, flush_each
from gpumond.facts.alerts import (
    AlertStates,
    Labels,
    Rule,
    as_resolved,
    from_stored,
    to_stored,
)
from gpumond.facts.errors import NoSuchEntry, StoreUnavailable
from gpumond.facts.flush import (
    FlushRequest,
    FlushResponse,
    Target,
    empty_receipt,
    receipt_without_bytes,
)
from gpumond.facts.frame import Alert
from gpumond.facts.pools import ENGINE_STEP, ExpectedRelease, FlushOutcome, Receipt
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, Snapshot
from gpumond.facts.suspension import SuspensionOutcome, SuspensionReceipt
from gpumond.features.alerts.action_decisions import (
    ActionKey,
    ActionOrder,
    ActionStates,
    annotate,
    decide_actions,
    forget_ended,
    restored_states,
    states_after_flush,
)
from gpumond.features.alerts.outbox import BACKOFF_SECONDS, Outbox
from gpumond.features.alerts.receivers.base import NotSent, ReceiverType
from gpumond.host.tasks import Tasks
from gpumond.quantities.device_scope import users_short_of_memory
from gpumond.store.audit import AuditEntry
from gpumond.store.store import Store

ACTION_AUDIT = "action"
"""The audit's action of a rule that is about to flush."""

SUSPENSION_OUTCOMES: Mapping[SuspensionOutcome, FlushOutcome] = {
    "suspended": "freed",
    "resumed": "nothing",
    "planned": "planned",
    "refused": "refused",
    "gone": "gone",
    "failed": "failed",
    "timeout": "timeout",
}

MAX_PAST_ALERTS = 1000
"""Kept in memory for the API; the store keeps more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The consequences of one frame's alerts, before any of them takes effect."""

    alerts: tuple[Alert, ...]
    """Alerts as the frame shows them: annotated with what rules have done."""
    firing: tuple[Alert, ...]
    """Alerts as receivers see them. One that resolved during its flush is included until its receipts are there."""
    resolved: tuple[Alert, ...]
    """Resolved alerts whose flushes, if any, are complete."""
    incomplete: Mapping[Labels, Alert]
    """Alerts that resolved while a flush for them is in progress."""
    changed: Mapping[Labels, Alert]
    """Alerts with new annotations."""
    orders: tuple[ActionOrder, ...]
    action_states: ActionStates
    alert_states: Mapping[str, AlertStates]


class AlertDispatcher:
    """Notifies, flushes for rules, and keeps alerts over a restart.

    ``flush`` is the one path by which anything is flushed; ``started_monotonic`` is the monotonic time of elapsed 0.
    ``request_end`` asks a program to end, and returns the reason if it did not. ``suspend`` suspends one, or plans it.
    ``past`` are resolved alerts, newest last, annotated with what rules did.
    """

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        flush: Callable[[FlushRequest, str], Awaitable[FlushResponse]],
        started_monotonic: float,
        request_end: Callable[[AgentReport, str], Awaitable[str]] | None = None,
        suspend: Callable[[AgentReport, str, bool], Awaitable[SuspensionReceipt]] | None = None,
    ) -> None:
        self._request_end, self._suspend = request_end, suspend
        self._store, self._outbox, self._flush, self._started_monotonic = store, outbox, flush, started_monotonic
        self.past: deque[Alert] = deque(maxlen=MAX_PAST_ALERTS)
        self._ended: dict[Labels, Alert] = {}
        self._unstored: deque[Alert] = deque(maxlen=MAX_PAST_ALERTS)
        self._action_states: ActionStates = {}
        self._changed: dict[Labels, Alert] = {}
        self._flushing: dict[ActionKey, Alert] = {}
        self._stored_state: object = None
        self._flushes = Tasks()
        self._writes = Tasks()

    async def restore(self) -> Mapping[str, AlertStates]:
        """Load the alerts, and the attempts of rules to flush, that the previous daemon stored."""
        try:
            alerts, last_activity = await self._store.stored_alerts()
            entries = await self._store.audit_entries(include_users=False)
            self.past.extend(await self._store.past_alerts())
        except StoreUnavailable:
            return {}
        attempts = (_attempt(entry) for entry in entries if entry.action == ACTION_AUDIT)
        self._action_states = restored_states([attempt for attempt in attempts if attempt], time.time())
        alert_states = from_stored(alerts, last_activity, time.time())
        if last_activity is not None and not alert_states:
            self._add_past(as_resolved(each.alert, last_activity.at) for each in alerts if each.alert.phase == "firing")
        return alert_states

    def decide(
        self,
        rules: Sequence[Rule],
        alerts: Sequence[Alert],
        snapshot: Snapshot,
        alert_states: Mapping[str, AlertStates],
        resolved: Sequence[Alert] = (),
        users_short_of_memory: Mapping[str, frozenset[int]] = {},
    ) -> Dispatch:
        """Return the consequences of one frame's alerts, and change nothing. ``users_short_of_memory``: as in
        `decide_actions`."""
        now = snapshot.elapsed_seconds
        orders, states = decide_actions(
            rules, alerts, snapshot.reports, self._action_states, now, snapshot.engine_devices, users_short_of_memory
        )
        flushing = {alert.labels: alert for alert in self._flushing.values()}
        ended = {**self._ended, **{alert.labels: alert for alert in resolved}}
        complete = annotate([alert for labels, alert in ended.items() if labels not in flushing], states)
        states = forget_ended(states, alerts, now)
        alerts = annotate(alerts, states)
        awaiting = set(flushing) - {alert.labels for alert in alerts}
        return Dispatch(
            alerts=alerts,
            firing=(*alerts, *(flushing[labels] for labels in awaiting)),
            resolved=complete,
            incomplete={labels: alert for labels, alert in ended.items() if labels in flushing},
            changed={**self._changed, **{alert.labels: alert for alert in complete}},
            orders=tuple(orders),
            action_states=states,
            alert_states=alert_states,
        )

    def execute(self, dispatch: Dispatch) -> None:
        """Queue notifications, start flushes and store the state of alerts; waits for none of it.

        ``dispatch`` is the last result of ``decide``, and nothing else has run on the event loop since.
        """
        self._action_states, self._ended, self._changed = dispatch.action_states, dict(dispatch.incomplete), {}
        self._add_past(dispatch.resolved)
        for order in dispatch.orders:
            self._flushes.start(self._run_action(order))
        notices = self._outbox.put(dispatch.firing, dispatch.changed)
        state = frozenset(
            (labels, each.alert.phase, each.active_monotonic, each.cleared_monotonic, each.alert.labels)
            for active in dispatch.alert_states.values()
            for labels, each in active.items()
        )
        if (notices or self._unstored or state != self._stored_state) and self._store.writable:
            past = tuple(self._unstored)
            self._unstored.clear()
            self._stored_state = state
            storing = self._store.store_alerts(to_stored(dispatch.alert_states, self._started_monotonic), notices, past)
            self._writes.start(self._store_alerts(storing, past))

    async def close(self) -> None:
        """Cancel the flushes of rules, which then write their audit entries, and wait for these and other writes."""
        await self._flushes.cancel()
        await self._writes.finish()

    async def _store_alerts(self, storing: Awaitable[None], past: Sequence[Alert]) -> None:
        try:
            await storing
        except StoreUnavailable:
            self._stored_state = None  # stored again when the store is writable
            self._unstored.extendleft(reversed(past))

    def _add_past(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            self.past.append(alert)
            self._unstored.append(alert)

    async def _run_action(self, order: ActionOrder) -> None:
        actor, problem = f"rule:{order.alert.rule}", ""
        receipts: list[Receipt] = []
        end_results: list[str] = []
        self._flushing[order.key] = order.alert
        try:
            if not order.action.dry_run:
                detail = {"labels": order.alert.labels, "uid": order.uid, "pids": order.pids}
                engines = {"engines": order.engines} if order.engines else {}
                await self._store.audit(actor, ACTION_AUDIT, detail | engines)
            flushed = await flush_each(self._flush, _requests(order, actor), actor)
            receipts += (receipt for each in flushed for receipt in each)
            receipts += [await self._suspend_one(order, each, actor) for each in order.programs if order.action.suspend]
            if order.action.request_end and not order.action.dry_run:
                end_results += [await self._ask_to_end(program, actor) for program in order.programs]
        except StoreUnavailable as error:
            problem = str(error)
        finally:
            del self._flushing[order.key]
            self._action_states = states_after_flush(self._action_states, order, receipts, problem, end_results)
            if order.alert.labels not in {alert.labels for alert in self._flushing.values()}:
                (self._changed[order.alert.labels],) = annotate([order.alert], self._action_states)

    async def _suspend_one(self, order: ActionOrder, program: AgentReport, actor: str) -> Receipt:
        """Suspend one program after its flush. The receipt is in the form of a flush, for the rule's limits."""
        if self._suspend is None:
            return empty_receipt(program, "refused", "suspensions aren't available", actor, time.time())
        receipt = await self._suspend(program, actor, order.action.dry_run)
        size = receipt.expected_bytes
        return replace(
            empty_receipt(program, SUSPENSION_OUTCOMES[receipt.outcome], receipt.reason, actor, receipt.started_at),
            expected=None if size is None else ExpectedRelease(size, size, size),
            released_bytes=receipt.released_bytes or 0,
            driver_released_bytes=receipt.released_bytes,
            duration_seconds=receipt.duration_seconds,
        )

    async def _ask_to_end(self, program: AgentReport, actor: str) -> str:
        """Ask a program to end, and return a sentence about it. Raises StoreUnavailable."""
        subject = f"{program.workload or 'the program'} (pid {program.pid})"
        reason = await self._request_end(program, actor) if self._request_end else "requests to exit aren't available"
        return f"{subject} wasn't asked to exit: {reason}" if reason else f"{subject} was asked to exit"


def _requests(order: ActionOrder, actor: str) -> Iterator[tuple[FlushRequest, Receipt]]:
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


def _attempt(entry: AuditEntry) -> tuple[ActionKey, float] | None:
    """Return key and time of an attempt to flush; None if the entry is damaged and does not name its alert."""
    try:
        labels = tuple((str(name), str(text)) for name, text in entry.detail["labels"])
        uid = entry.detail.get("uid")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return (entry.actor.removeprefix("rule:"), labels, uid if isinstance(uid, int) else None), entry.at


log = logging.getLogger(__name__)

TEST_RULE = "gpumond-test"
"""The rule that a test message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTest:
    """A receiver's response to a test message.

    `status` is its HTTP status, null without a response or if the receiver doesn't use HTTP. `reason` is one of the
    reasons of `gpumond_notifications_failed_total`, and empty if the receiver accepted the message; `detail` describes
    the error.
    """

    receiver: str
    accepted: bool
    status: int | None
    reason: str
    detail: str
    duration_seconds: float


async def send_test(receiver: ReceiverType, requested_by: str) -> ReceiverTest:
    """Send one alert that is marked as a test, as a notification is sent. The address is never in the result."""
    now, started = time.time(), time.monotonic()
    alert = Alert(
        rule=TEST_RULE,
        phase="firing",
        labels=(("alertname", TEST_RULE), ("severity", "info"), ("test", "true")),
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
        duration_seconds=time.monotonic() - started,
    )


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Where notifications are sent. ``backoff_seconds``: the shortest and the longest pause before another attempt."""

    receivers_of: Callable[[Settings], Sequence[ReceiverType]] = lambda settings: settings.receivers
    backoff_seconds: tuple[float, float] = BACKOFF_SECONDS


class AlertsPart(Part):
    def __init__(self, core: Core) -> None:
        self._core, self._store = core, core.store
        self._receiver_options = core.find(ReceiverOptions) or ReceiverOptions()
        self._rules = core.get(RuleService)
        silences = core.find(SilenceService)
        self.outbox = Outbox(
            self._receiver_options.receivers_of(core.settings),
            core.store,
            core.telemetry,
            wants=self._receives,
            is_silenced=lambda alert: silences is not None and bool(silences.silences_of(alert)),
            backoff_seconds=self._receiver_options.backoff_seconds,
        )
        self.dispatcher = AlertDispatcher(
            core.store,
            self.outbox,
            core.get(FlushService).flush,
            core.started_monotonic,
            self._request_end,
            self._suspend,
        )
        self._dispatch: Dispatch | None = None
        core.provide(AlertsPart, self)

    async def load(self) -> Sequence[str]:
        await self.dispatcher.restore()
        await self.outbox.open()
        return ()

    def conclude(self, tick: Tick) -> Tick:
        snapshot, reclaim = tick.frame.snapshot, self._core.settings.reclaim
        users = {} if reclaim == "all" else users_short_of_memory(tick.window, snapshot)
        self._dispatch = self.dispatcher.decide(
            self._rules.rules, tick.frame.alerts, snapshot, tick.alert_states, tick.resolved, users
        )
        return replace(tick, frame=replace(tick.frame, alerts=self._dispatch.alerts))

    def act(self, tick: Tick) -> None:
        assert self._dispatch is not None
        self.dispatcher.execute(self._dispatch)

    async def configure(self, settings: Settings) -> None:
        await self.outbox.configure(self._receiver_options.receivers_of(settings))

    async def close(self) -> None:
        await self.dispatcher.close()
        await self.outbox.close()

    def past(self) -> Sequence[Alert]:
        """Return the alerts that have been resolved, newest last."""
        return tuple(self.dispatcher.past)

    async def test_receiver(self, name: str, requested_by: str) -> ReceiverTest:
        """Send a test message to a receiver, without its queue. Raises NoSuchEntry, StoreUnavailable."""
        receivers = {receiver.name: receiver for receiver in self._receiver_options.receivers_of(self._core.settings)}
        if name not in receivers:
            raise NoSuchEntry(f"no receiver has the name {name}; known receivers: {', '.join(receivers) or 'none'}")
        await self._store.audit(requested_by, "receiver.test", {"receiver": name})
        return await send_test(receivers[name], requested_by)

    def _receives(self, receiver: str, rule: str) -> bool:
        """An alert of a rule whose receivers are all unknown is sent to every receiver."""
        receivers = next((each.receivers for each in self._rules.rules if each.name == rule), ())
        return receiver in receivers or not set(receivers) & set(self._core.settings.receiver_names())

    async def _suspend(self, report: AgentReport, requested_by: str, dry_run: bool) -> SuspensionReceipt:
        return await self._core.get(SuspendService).suspend_idle(report.key, requested_by, dry_run)

    async def _request_end(self, report: AgentReport, requested_by: str) -> str:
        """Ask a program to end. Return the reason if it was not asked. Raises StoreUnavailable."""
        if not self._core.settings.allow_end_requests:
            return "the configuration doesn't allow it (allow_end_requests)"
        return await self._core.program_requests.request_end(report, requested_by)
