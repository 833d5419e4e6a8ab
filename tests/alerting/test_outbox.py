"""Everyone is told everything at least once, in order, and nobody waits for anybody else."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpumond.alerting.outbox import Outbox, ReceiverQueue
from gpumond.alerting.receivers import Rejected, Retry
from gpumond.errors import StoreUnavailable
from gpumond.model.frame import Alert
from gpumond.model.persisted import Notice
from gpumond.store import Store

T = TypeVar("T")
QUICK = (0.001, 0.002)


def an_alert(name: str = "a", phase: str = "firing") -> Alert:
    return Alert(
        rule="full",
        phase="firing" if phase == "firing" else "pending",
        labels=(("alertname", name),),
        annotations=(),
        value=1.0,
        active_at=1.0,
        fired_at=2.0,
    )


class Recorder:
    """A receiver that remembers what it was told. ``failing``: the error that it raises instead."""

    def __init__(self, name: str = "hook", resend_seconds: float | None = None) -> None:
        self.name, self.resend_seconds = name, resend_seconds
        self.told: list[tuple[str, str]] = []
        self.failing: Exception | None = None
        self.tries = 0

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        self.tries += 1
        await asyncio.sleep(0)
        if self.failing:
            raise self.failing
        self.told += [("firing", dict(alert.labels)["alertname"]) for alert in raised]
        self.told += [("resolved", dict(alert.labels)["alertname"]) for alert in resolved]


class NoJournal:
    """A store that cannot be written."""

    async def undelivered(self, receivers: object) -> tuple[list[Notice], list[tuple[str, Alert]]]:
        raise StoreUnavailable("no")

    async def delivered(self, notices: Sequence[Notice], accepted: bool) -> None:
        raise StoreUnavailable("no")


class Counts:
    def __init__(self) -> None:
        self.sent: list[str] = []
        self.failed: list[tuple[str, str]] = []

    def notified(self, notifier: str) -> None:
        self.sent.append(notifier)

    def not_notified(self, notifier: str, reason: str) -> None:
        self.failed.append((notifier, reason))


def with_outbox(
    work: Callable[[Outbox], Awaitable[T]], *receivers: Recorder, counts: Counts | None = None, **options: object
) -> T:
    async def run() -> T:
        outbox = Outbox(receivers, NoJournal(), counts or Counts(), backoff_seconds=QUICK, **options)  # type: ignore[arg-type]
        await outbox.open()
        try:
            return await asyncio.wait_for(work(outbox), 20)
        finally:
            await outbox.close()

    return asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


FIRED, OVER = ("firing", "a"), ("resolved", "a")


def test_an_alert_is_told_when_it_fires_and_when_it_is_over_and_not_in_between():
    hook = Recorder()

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert(phase="pending")])
        for _ in range(3):
            outbox.put([an_alert()])
        await until(lambda: hook.told)
        outbox.put([])
        await until(lambda: len(hook.told) == 2)

    with_outbox(work, hook)
    assert hook.told == [FIRED, OVER]


def test_what_fires_and_is_over_while_the_receiver_is_down_is_told_in_order_later():
    hook = Recorder()
    hook.failing = Retry("connection", "down")

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        outbox.put([])
        await until(lambda: hook.tries > 3)
        hook.failing = None
        await until(lambda: len(hook.told) == 2)

    with_outbox(work, hook)
    assert hook.told == [FIRED, OVER]


def test_what_is_rejected_is_not_repeated_and_its_end_is_not_told():
    hook, counts = Recorder(), Counts()
    hook.failing = Rejected("auth", "401")

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        await until(lambda: hook.tries)
        hook.failing = None
        outbox.put([])
        outbox.put([an_alert("b")])
        await until(lambda: hook.told)

    with_outbox(work, hook, counts=counts)
    assert hook.told == [("firing", "b")]
    assert (hook.tries, counts.failed) == (2, [("hook", "auth")])


def test_a_receiver_that_hangs_delays_no_other():
    slow, quick = Recorder("slow"), Recorder("quick")

    async def hang(raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        await asyncio.Event().wait()

    slow.send = hang  # type: ignore[method-assign]

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        await until(lambda: quick.told)

    with_outbox(work, slow, quick)


def test_an_error_of_a_receiver_itself_is_not_the_end_of_its_worker():
    hook, counts = Recorder(), Counts()
    hook.failing = RuntimeError("a bug")

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        await until(lambda: hook.tries)
        hook.failing = None
        await until(lambda: hook.told)

    with_outbox(work, hook, counts=counts)
    assert ("hook", "error") in counts.failed


def test_what_a_full_queue_cannot_take_is_taken_later():
    hook, counts = Recorder(), Counts()
    hook.failing = Retry("connection", "down")
    alerts = [an_alert(str(number)) for number in range(30)]

    async def work(outbox: Outbox) -> None:
        assert len(outbox.put(alerts)) == 10
        assert outbox.put(alerts) == []
        hook.failing = None
        while len(hook.told) < 30:
            outbox.put(alerts)
            await asyncio.sleep(0.002)

    with_outbox(work, hook, counts=counts, queue_limit=10)
    assert sorted(hook.told) == sorted(("firing", str(number)) for number in range(30))
    assert ("hook", "queue_full") in counts.failed


def test_a_rule_can_name_its_receivers():
    named, other = Recorder("named"), Recorder("other")

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        await until(lambda: named.told)
        outbox.put([])
        await until(lambda: len(named.told) == 2)

    with_outbox(work, named, other, wants=lambda receiver, rule: receiver == "named")
    assert other.told == []


def test_news_of_an_alert_is_told_once_more():
    hook = Recorder()

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        outbox.put([an_alert()], {an_alert().labels: an_alert()})
        await until(lambda: len(hook.told) == 2)

    with_outbox(work, hook)
    assert hook.told == [FIRED, FIRED]


def test_where_once_is_not_enough_what_fires_and_what_is_over_is_sent_again():
    manager = Recorder(resend_seconds=0.01)

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        await until(lambda: manager.told.count(FIRED) > 3)
        outbox.put([])
        await until(lambda: manager.told.count(OVER) > 3)

    with_outbox(work, manager)
    over = manager.told.index(OVER)
    assert FIRED not in manager.told[over:]


def test_what_is_over_is_sent_again_only_for_a_while():
    manager = Recorder(resend_seconds=0.005)

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        await until(lambda: manager.told)
        outbox.put([])
        await until(lambda: OVER in manager.told)
        await until(lambda: not lanes(outbox)[0]._resolved)

    with_outbox(work, manager, keep_resolved_seconds=0.05)
    assert manager.told.count(OVER) > 1


def test_while_something_fires_no_pause_is_longer_than_a_minute_allows():
    async def pauses(outbox: Outbox) -> float:
        (lane,) = lanes(outbox)
        lane._backoff = (1.0, 300.0)
        return max(lane._pause(failures=30) for _ in range(1000))

    async def firing(outbox: Outbox) -> float:
        outbox.put([an_alert()])
        return await pauses(outbox)

    async def only_over(outbox: Outbox) -> float:
        lanes(outbox)[0].add_known(an_alert())
        outbox.put([])
        return await pauses(outbox)

    assert 50 < with_outbox(firing, Recorder()) <= 55
    assert 250 < with_outbox(only_over, Recorder()) <= 300
    assert with_outbox(only_over, Recorder(resend_seconds=30.0)) <= 30


def test_receivers_can_be_replaced_while_others_go_on():
    stays, goes, comes = Recorder("stays"), Recorder("goes"), Recorder("comes")
    stays.failing = goes.failing = Retry("connection", "down", after_seconds=3600)
    mended = Recorder("stays")

    async def work(outbox: Outbox) -> None:
        outbox.put([an_alert()])
        await until(lambda: stays.tries and goes.tries)
        await outbox.configure([mended, comes])
        outbox.put([an_alert()])
        await until(lambda: mended.told and comes.told)
        outbox.put([])
        await until(lambda: len(mended.told) == len(comes.told) == 2)

    with_outbox(work, stays, goes)
    assert (stays.told, goes.told, goes.tries) == ([], [], 1)
    assert mended.told == comes.told == [FIRED, OVER]


def lanes(outbox: Outbox) -> list[ReceiverQueue]:
    return list(outbox._queues.values())


class Delivery(RuleBasedStateMachine):
    """A daemon with a real store and a receiver: alerts fire and end, the receiver fails, the daemon is killed."""

    NAMES = ("a", "b", "c")

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.hook = Recorder()
        self.firing: set[str] = set()
        self.happened: list[tuple[str, str]] = []
        self.crashes = 0
        self.start()

    def start(self) -> None:
        async def start() -> None:
            self.store = Store(Path(self.directory.name) / "state" / "gpumond.db", beat_seconds=3600)
            await self.store.open()
            self.outbox = Outbox([self.hook], self.store, Counts(), backoff_seconds=(0.0, 0.0))
            await self.outbox.open()

        self.loop.run_until_complete(start())

    def tick(self) -> None:
        async def tick() -> None:
            notices = self.outbox.put([an_alert(name) for name in sorted(self.firing)])
            await self.store.keep([], notices)

        self.loop.run_until_complete(tick())

    @rule(name=st.sampled_from(NAMES))
    def fire(self, name: str) -> None:
        if name not in self.firing:
            self.happened.append(("firing", name))
        self.firing.add(name)
        self.tick()

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        if name in self.firing:
            self.happened.append(("resolved", name))
        self.firing.discard(name)
        self.tick()

    @rule()
    def outage(self) -> None:
        self.hook.failing = Retry("connection", "down")

    @rule()
    def recovery(self) -> None:
        self.hook.failing = None

    @rule(turns=st.integers(0, 12))
    def time_passes(self, turns: int) -> None:
        async def turn() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    @rule()
    def crash(self) -> None:
        """What is under way is cut off; what was committed is all that is left. Then a new daemon ticks."""

        async def kill() -> None:
            workers = list(self.outbox._workers.values())
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self.store.close()

        self.loop.run_until_complete(kill())
        self.crashes += 1
        self.start()
        self.tick()

    @precondition(lambda self: hasattr(self, "hook"))
    @invariant()
    def nothing_is_resolved_that_was_not_told_to_fire(self) -> None:
        for name in self.NAMES:
            told = [kind for kind, other in self.hook.told if other == name]
            assert told[:1] != ["resolved"], self.hook.told

    def teardown(self) -> None:
        if not hasattr(self, "hook"):
            return
        self.hook.failing = None

        async def settle() -> None:
            self.outbox.put([an_alert(name) for name in sorted(self.firing)])
            (lane,) = self.outbox._queues.values()
            await asyncio.wait_for(lane.idle.wait(), 10)
            await self.outbox.close()
            await self.store.close()

        self.loop.run_until_complete(settle())
        self.loop.close()
        self.directory.cleanup()
        for name in self.NAMES:
            happened = [kind for kind, other in self.happened if other == name]
            told = [kind for kind, other in self.hook.told if other == name]
            assert _without_repeats(told) == happened, (told, happened)
            assert len(told) <= len(happened) + self.crashes, "at most one repeat for each crash"


def _without_repeats(kinds: list[str]) -> list[str]:
    return [kind for before, kind in zip([None, *kinds], kinds, strict=False) if kind != before]


Delivery.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestDelivery = Delivery.TestCase
