"""Actions of rules: which programs and engines a rule flushes now, and whether that had an effect. No I/O.

A rule's action waits its cooldown between two flushes and observes its limit per hour. A flush that released nothing,
or whose memory was allocated again by the time of the next one, doubles the wait, and its alert states this. All limits
are counted for each user separately: one user's programs do not affect the flushes of another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gpumond.facts.alerts import Action, Labels, Rule, same_process
from gpumond.facts.engines import EngineReading
from gpumond.facts.flush import labels_match_program, reclaimable_bytes
from gpumond.facts.frame import Alert
from gpumond.facts.pools import ENGINE_STEP, PoolUsage, Receipt
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport
from gpumond.facts.units import HOUR_SECONDS, duration_text, size_text

MAX_WAIT_SECONDS = 24 * HOUR_SECONDS
REFILL_RATIO = 0.5
"""A flush is ineffective if the programs allocated this share of the released bytes again."""

ACTION_ANNOTATION = "action"


ActionKey = tuple[str, Labels, int | None]
"""Rule and labels of an alert, and the user whose programs are flushed; None in audits of earlier versions"""

PoolKey = tuple[ProcessKey, str, str]
"""Process, device and allocator"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOrder:
    """An action on programs and serving engines of one user, for one alert."""

    alert: Alert
    action: Action
    uid: int
    programs: tuple[AgentReport, ...]
    refilled_flushes: tuple[tuple[PoolKey, int], ...] = ()
    """Refilled flushes that the programs' pools had counted before the flush."""
    engines: tuple[str, ...] = ()
    """Names of the serving engines."""

    @property
    def key(self) -> ActionKey:
        return self.alert.rule, self.alert.labels, self.uid

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(report.pid for report in self.programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRelease:
    """What a flush released from a pool and left in it, to evaluate its effect later."""

    process: ProcessKey
    device_uuid: str
    allocator: str
    held_bytes: int
    released_bytes: int
    refilled_flushes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionState:
    """Flushes of an action for one alert and one user. ``attempt_times``: elapsed seconds of the last hour's attempts.

    ``process`` is that of the alert, if it has one.
    """

    attempt_times: tuple[float, ...] = ()
    failures: int = 0
    is_under_way: bool = False
    releases: tuple[PoolRelease, ...] = ()
    note: str = ""
    process: ProcessKey | None = None

    def due_at(self, action: Action) -> float:
        if not self.attempt_times:
            return float("-inf")
        wait = action.cooldown_seconds * 2.0 ** min(self.failures, 30)
        return self.attempt_times[-1] + max(action.cooldown_seconds, min(wait, MAX_WAIT_SECONDS))


ActionStates = Mapping[ActionKey, ActionState]


def decide_actions(
    rules: Iterable[Rule],
    alerts: Iterable[Alert],
    reports: Sequence[AgentReport],
    states: ActionStates,
    monotonic_now: float,
    engines: Sequence[tuple[EngineReading, frozenset[str]]] = (),
    users_short_of_memory: Mapping[str, frozenset[int]] = {},
) -> tuple[list[ActionOrder], ActionStates]:
    """Return the flushes that are due now; their states are ``is_under_way`` until ``states_after_flush``.

    ``engines``: each with the devices that its processes use. ``users_short_of_memory``: by UUID, the users whose
    programs alone may be flushed by a rule on `reclaimable_under_pressure_ratio`, since nobody else ran short of
    memory.
    """
    rules_with_action = {rule.name: rule for rule in rules if rule.action is not None}
    if not rules_with_action:
        return [], states
    next_states = dict(states)
    orders: list[ActionOrder] = []
    for alert in alerts:
        rule = rules_with_action.get(alert.rule)
        if rule is None or rule.action is None or alert.phase != "firing":
            continue
        action = rule.action
        reports_in_scope, engines_in_scope = _in_scope(rule, alert, reports, engines)
        programs: defaultdict[int, list[AgentReport]] = defaultdict(list)
        for report in _flushable_programs(alert, action, reports_in_scope):
            programs[report.uid].append(report)
        idle_engines: defaultdict[int, list[str]] = defaultdict(list)
        for uid, name in _flushable_engines(alert, action, engines_in_scope):
            idle_engines[uid].append(name)
        users_with_state = (
            uid for rule, labels, uid in next_states if (rule, labels) == (alert.rule, alert.labels) and uid is not None
        )
        uuid = dict(alert.labels).get("uuid", "") if rule.value == "reclaimable_under_pressure_ratio" else ""
        for uid in {*programs, *idle_engines} - users_short_of_memory.get(uuid, {*programs, *idle_engines}):
            programs.pop(uid, None)
            idle_engines.pop(uid, None)
        for uid in sorted({*programs, *idle_engines, *users_with_state}):
            key = (alert.rule, alert.labels, uid)
            state = _judge_last_flush(
                _reset_if_process_changed(next_states.get(key, ActionState()), alert), action, reports, monotonic_now
            )
            is_due = not state.is_under_way and monotonic_now >= state.due_at(action)
            if (
                (uid in programs or uid in idle_engines)
                and is_due
                and _attempts_in_last_hour(next_states, alert.rule, uid, monotonic_now) < action.max_per_hour
            ):
                orders.append(
                    ActionOrder(
                        alert=alert,
                        action=action,
                        uid=uid,
                        programs=tuple(programs[uid]),
                        refilled_flushes=_refilled_flushes(reports),
                        engines=tuple(idle_engines[uid]),
                    )
                )
                attempts = (*_recent_attempts(state, monotonic_now), monotonic_now)
                state = replace(state, is_under_way=True, attempt_times=attempts, releases=(), process=alert.process)
            if state != ActionState():
                next_states[key] = state
    return orders, next_states


def states_after_flush(
    states: ActionStates, order: ActionOrder, receipts: Sequence[Receipt], problem: str = "", ends: Sequence[str] = ()
) -> ActionStates:
    """Return the states after a flush; ``problem`` is the reason if there was none, ``ends`` the results of
    requests to end.
    """
    state = states.get(order.key, ActionState())
    has_failed = not any(receipt.released_bytes > 0 for receipt in receipts) and not (order.action.dry_run and receipts)
    state = replace(
        state,
        is_under_way=False,
        failures=state.failures + 1 if has_failed else state.failures,
        releases=tuple(_pool_releases(receipts, dict(order.refilled_flushes))),
    )
    note = "; ".join((_note(order, receipts, problem), *ends))
    if has_failed:
        note += f"; next attempt in {_wait_text(state, order.action)}"
    return {**states, order.key: replace(state, note=note)}


def restored_states(attempts: Iterable[tuple[ActionKey, float]], now: float) -> ActionStates:
    """Return the states of a daemon that starts, so a restart keeps the flushes of the last hour.

    ``attempts``: by key and Unix time, oldest first.
    """
    states: dict[ActionKey, ActionState] = {}
    for key, at in attempts:
        ago = max(0.0, now - at)
        if ago < HOUR_SECONDS:
            states[key] = ActionState(attempt_times=(*states.get(key, ActionState()).attempt_times, -ago))
    return states


def annotate(alerts: Iterable[Alert], states: ActionStates) -> tuple[Alert, ...]:
    """Return the alerts, each with the results of its action as an annotation."""
    states_by_alert: defaultdict[tuple[str, Labels], list[ActionState]] = defaultdict(list)
    for (rule, labels, _), state in states.items():
        if state.note:
            states_by_alert[rule, labels].append(state)

    def with_notes(alert: Alert) -> Alert:
        of_alert = states_by_alert.get((alert.rule, alert.labels), ())
        notes = [state.note for state in of_alert if same_process(state.process, alert.process)]
        return (
            replace(alert, annotations=(*alert.annotations, (ACTION_ANNOTATION, "; ".join(notes)))) if notes else alert
        )

    return tuple(map(with_notes, alerts))


def forget_ended(states: ActionStates, alerts: Iterable[Alert], monotonic_now: float) -> ActionStates:
    """Return the states without those of alerts that ended before the longest wait."""
    active = {(alert.rule, alert.labels) for alert in alerts}
    return {
        key: state if key[:2] in active else replace(state, note="")
        for key, state in states.items()
        if key[:2] in active
        or state.is_under_way
        or (state.attempt_times and monotonic_now - state.attempt_times[-1] < MAX_WAIT_SECONDS)
    }


def _reset_if_process_changed(state: ActionState, alert: Alert) -> ActionState:
    """Return the state, or only its attempts if the pid of the alert's process is reused: the limits remain."""
    if state.is_under_way or same_process(state.process, alert.process):
        return state
    return ActionState(attempt_times=state.attempt_times)


def _judge_last_flush(
    state: ActionState, action: Action, reports: Sequence[AgentReport], monotonic_now: float
) -> ActionState:
    """Return the state with the effect of its last flush, once that is old enough."""
    if not state.releases or state.is_under_way or monotonic_now < state.due_at(action):
        return state
    pools = {(report.key, pool.device_uuid, pool.allocator): pool for report in reports for pool in report.pools}
    released = sum(each.released_bytes for each in state.releases)
    if sum(_reallocated_bytes(each, pools) for each in state.releases) < REFILL_RATIO * released:
        return replace(state, failures=0, releases=())
    state = replace(state, failures=state.failures + 1, releases=())
    note = f"the programs reallocated the memory that the last flush released ({size_text(released)})"
    return replace(state, note=f"{note}; next attempt {_wait_text(state, action)} after that flush")


def _reallocated_bytes(release: PoolRelease, pools: Mapping[PoolKey, PoolUsage]) -> int:
    """Return the bytes that the program allocated again; all if its agent observed it, even if they are free now."""
    pool = pools.get((release.process, release.device_uuid, release.allocator))
    if pool is None:
        return 0
    if pool.refilled_flushes > release.refilled_flushes:
        return release.released_bytes
    return max(0, min(release.released_bytes, pool.held_bytes - release.held_bytes))


def _refilled_flushes(reports: Iterable[AgentReport]) -> tuple[tuple[PoolKey, int], ...]:
    pools = ((report.key, pool) for report in reports for pool in report.pools)
    return tuple(
        ((key, pool.device_uuid, pool.allocator), pool.refilled_flushes) for key, pool in pools if pool.refilled_flushes
    )


def _in_scope(
    rule: Rule, alert: Alert, reports: Sequence[AgentReport], engines: Sequence[tuple[EngineReading, frozenset[str]]]
) -> tuple[Sequence[AgentReport], Sequence[tuple[EngineReading, frozenset[str]]]]:
    """Return the programs and engines that a rule of this scope may flush: with scope engine, the alert's only."""
    if rule.scope != "engine":
        return reports, engines
    name = dict(alert.labels).get("engine")
    named = [each for each in engines if each[0].name == name]
    keys = {process.key for engine, _ in named for process in engine.processes}
    return [report for report in reports if report.key in keys], named


def _flushable_programs(alert: Alert, action: Action, reports: Sequence[AgentReport]) -> Iterator[AgentReport]:
    """Yield the programs that the alert concerns, that may be flushed, and that have enough reclaimable memory."""
    labels = dict(alert.labels)
    for report in reports if action.program_steps or action.suspend else ():
        suspends = action.suspend and report.may_suspend  # once it is idle
        flushes = bool(action.program_steps) and report.flush_policy != "never"
        if not (suspends or flushes) or not any(fnmatchcase(report.workload, glob) for glob in action.workloads):
            continue
        if not labels_match_program(labels, report) or alert.process not in (None, report.key):
            continue
        min_bytes = 0 if action.request_end else max(1, action.min_reclaimable_bytes)
        if suspends or reclaimable_bytes(labels, report) >= min_bytes:
            yield report


def _flushable_engines(
    alert: Alert, action: Action, engines: Sequence[tuple[EngineReading, frozenset[str]]]
) -> Iterator[tuple[int, str]]:
    """Yield user and name of the engines that the alert concerns, that may be flushed, and that are idle enough."""
    labels = dict(alert.labels)
    for engine, devices in engines if ENGINE_STEP in action.steps else ():
        is_idle = engine.idle_seconds is not None and engine.idle_seconds >= action.only_idle_for_seconds
        if not engine.methods or not engine.processes or engine.sleeping or engine.uid is None or not is_idle:
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


def _recent_attempts(state: ActionState, monotonic_now: float) -> tuple[float, ...]:
    return tuple(at for at in state.attempt_times if monotonic_now - at < HOUR_SECONDS)


def _attempts_in_last_hour(states: ActionStates, rule: str, uid: int, monotonic_now: float) -> int:
    matching = (state for (name, _, user), state in states.items() if (name, user) == (rule, uid))
    return sum(len(_recent_attempts(state, monotonic_now)) for state in matching)


def _pool_releases(receipts: Iterable[Receipt], refilled_flushes: Mapping[PoolKey, int]) -> Iterator[PoolRelease]:
    for receipt in receipts:
        if receipt.released_bytes > 0 and receipt.after and receipt.device_uuid and receipt.allocator:
            process = ProcessKey(receipt.pid, receipt.start_ticks)
            yield PoolRelease(
                process=process,
                device_uuid=receipt.device_uuid,
                allocator=receipt.allocator,
                held_bytes=receipt.after.held_bytes,
                released_bytes=receipt.released_bytes,
                refilled_flushes=refilled_flushes.get((process, receipt.device_uuid, receipt.allocator), 0),
            )


def _wait_text(state: ActionState, action: Action) -> str:
    return duration_text(
        state.due_at(action) - state.attempt_times[-1] if state.attempt_times else action.cooldown_seconds
    )


def _note(order: ActionOrder, receipts: Sequence[Receipt], problem: str) -> str:
    noun = "suspension" if order.action.suspend else "flush"
    if not receipts:
        return f"no {noun}: {problem or 'no receipt'}"
    programs = ", ".join(dict.fromkeys(receipt.workload or f"pid {receipt.pid}" for receipt in receipts))
    sizes = [receipt.expected.likely for receipt in receipts if receipt.expected]
    known_sizes = [size for size in sizes if size is not None]
    expected = size_text(sum(known_sizes)) if len(known_sizes) == len(sizes) else "an unknown amount"
    if order.action.dry_run:
        return f"dry run: a {noun} of {programs} would release {expected}"
    released = sum(max(0, receipt.released_bytes) for receipt in receipts)
    if released > 0:
        verb = "suspended" if order.action.suspend else "flushed"
        return f"{verb} {programs}: {size_text(released)} released, {expected} expected"
    reasons = "; ".join(dict.fromkeys(f"{each.outcome}: {each.reason}".rstrip(": ") for each in receipts))
    return f"a {noun} of {programs} released nothing ({reasons})"
