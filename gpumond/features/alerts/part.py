"""Alerts in the daemon: notifications, flushes by rules, and what survives a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpumond.config.settings import Settings
from gpumond.facts.errors import NoSuchReceiver
from gpumond.facts.frame import Alert
from gpumond.facts.snapshot import AgentReport
from gpumond.facts.suspension import SuspensionReceipt
from gpumond.features.alerts.dispatcher import AlertDispatcher, Dispatch
from gpumond.features.alerts.outbox import BACKOFF_SECONDS, Outbox
from gpumond.features.alerts.receivers import Receiver
from gpumond.features.alerts.receivers.test_message import ReceiverTest, send_test
from gpumond.kernel import Flushes, Kernel, Part, Rules, Silencing, Suspends, Tick
from gpumond.quantities.device import short_users


@dataclass(frozen=True, slots=True)
class Receivers:
    """Where notifications are sent. ``backoff_seconds``: the shortest and the longest pause before another attempt."""

    of: Callable[[Settings], Sequence[Receiver]] = lambda settings: settings.receivers
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
            return "the configuration does not allow it (allow_end_requests)"
        return await self._kernel.commands.request_end(report, requested_by)
