"""Delivery of notifications: each at least once, in order, and without delay by other receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from gpumond.facts.frame import Alert
from gpumond.features.alerts.outbox import Outbox, ReceiverQueue
from gpumond.features.alerts.receivers.base import Rejected, TemporaryFailure
from tests.alerts.deliveries import FIRED, QUICK, RESOLVED, DeliveryCounts, Recorder, UnwritableStore, make_alert, until

T = TypeVar("T")


def with_outbox(
    work: Callable[[Outbox], Awaitable[T]],
    *receivers: Recorder,
    counts: DeliveryCounts | None = None,
    **options: object,
) -> T:
    async def run() -> T:
        outbox = Outbox(receivers, UnwritableStore(), counts or DeliveryCounts(), backoff_seconds=QUICK, **options)  # type: ignore[arg-type]
        await outbox.open()
        try:
            return await asyncio.wait_for(work(outbox), 20)
        finally:
            await outbox.close()

    return asyncio.run(run())


def test_alert_is_sent_when_it_fires_and_when_it_resolves_only():
    receiver = Recorder()

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert(phase="pending")])
        for _ in range(3):
            outbox.put([make_alert()])
        await until(lambda: receiver.received)
        outbox.put([])
        await until(lambda: len(receiver.received) == 2)

    with_outbox(work, receiver)
    assert receiver.received == [FIRED, RESOLVED]


def test_notifications_during_an_outage_are_sent_in_order_afterwards():
    receiver = Recorder()
    receiver.failing = TemporaryFailure("connection", "down")

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        outbox.put([])
        await until(lambda: receiver.tries > 3)
        receiver.failing = None
        await until(lambda: len(receiver.received) == 2)

    with_outbox(work, receiver)
    assert receiver.received == [FIRED, RESOLVED]


def test_rejected_alert_is_not_repeated_and_not_sent_as_resolved():
    receiver, counts = Recorder(), DeliveryCounts()
    receiver.failing = Rejected("auth", "401")

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        await until(lambda: receiver.tries)
        receiver.failing = None
        outbox.put([])
        outbox.put([make_alert("b")])
        await until(lambda: receiver.received)

    with_outbox(work, receiver, counts=counts)
    assert receiver.received == [("firing", "b")]
    assert (receiver.tries, counts.failed) == (2, [("receiver", "auth")])


def test_hanging_receiver_delays_no_other():
    slow, quick = Recorder("slow"), Recorder("quick")

    async def hang(raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        await asyncio.Event().wait()

    slow.send = hang  # type: ignore[method-assign]

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        await until(lambda: quick.received)

    with_outbox(work, slow, quick)


def test_unexpected_error_of_a_receiver_does_not_end_its_worker():
    receiver, counts = Recorder(), DeliveryCounts()
    receiver.failing = RuntimeError("a bug")

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        await until(lambda: receiver.tries)
        receiver.failing = None
        await until(lambda: receiver.received)

    with_outbox(work, receiver, counts=counts)
    assert ("receiver", "error") in counts.failed


def test_alerts_beyond_a_full_queue_are_queued_later():
    receiver, counts = Recorder(), DeliveryCounts()
    receiver.failing = TemporaryFailure("connection", "down")
    alerts = [make_alert(str(number)) for number in range(30)]

    async def work(outbox: Outbox) -> None:
        assert len(outbox.put(alerts)) == 10
        assert outbox.put(alerts) == []
        receiver.failing = None
        while len(receiver.received) < 30:
            outbox.put(alerts)
            await asyncio.sleep(0.002)

    with_outbox(work, receiver, counts=counts, queue_limit=10)
    assert sorted(receiver.received) == sorted(("firing", str(number)) for number in range(30))
    assert ("receiver", "queue_full") in counts.failed


def test_rule_is_sent_to_its_named_receivers_only():
    named, other = Recorder("named"), Recorder("other")

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        await until(lambda: named.received)
        outbox.put([])
        await until(lambda: len(named.received) == 2)

    with_outbox(work, named, other, wants=lambda receiver, rule: receiver == "named")
    assert other.received == []


def test_changed_alert_is_sent_again():
    receiver = Recorder()

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        outbox.put([make_alert()], {make_alert().labels: make_alert()})
        await until(lambda: len(receiver.received) == 2)

    with_outbox(work, receiver)
    assert receiver.received == [FIRED, FIRED]


def test_receiver_with_a_resend_interval_gets_firing_and_resolved_alerts_again():
    manager = Recorder(resend_seconds=0.01)

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        await until(lambda: manager.received.count(FIRED) > 3)
        outbox.put([])
        await until(lambda: manager.received.count(RESOLVED) > 3)

    with_outbox(work, manager)
    over = manager.received.index(RESOLVED)
    assert FIRED not in manager.received[over:]


def test_resolved_alert_is_resent_for_a_limited_time():
    manager = Recorder(resend_seconds=0.005)

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        await until(lambda: manager.received)
        outbox.put([])
        await until(lambda: RESOLVED in manager.received)
        await until(lambda: not queues(outbox)[0]._resolved_until)

    with_outbox(work, manager, resolved_resend_seconds=0.05)
    assert manager.received.count(RESOLVED) > 1


def test_backoff_is_below_a_minute_while_an_alert_fires():
    async def pauses(outbox: Outbox) -> float:
        (queue,) = queues(outbox)
        outbox.backoff_seconds = (1.0, 300.0)
        return max(queue._pause_seconds(failures=30) for _ in range(1000))

    async def firing(outbox: Outbox) -> float:
        outbox.put([make_alert()])
        return await pauses(outbox)

    async def only_resolved(outbox: Outbox) -> float:
        queues(outbox)[0].add_active(make_alert())
        outbox.put([])
        return await pauses(outbox)

    assert 50 < with_outbox(firing, Recorder()) <= 55
    assert 250 < with_outbox(only_resolved, Recorder()) <= 300
    assert with_outbox(only_resolved, Recorder(resend_seconds=30.0)) <= 30


def test_receivers_can_be_replaced_during_an_outage():
    kept, removed, added = Recorder("kept"), Recorder("removed"), Recorder("added")
    kept.failing = removed.failing = TemporaryFailure("connection", "down", after_seconds=3600)
    repaired = Recorder("kept")

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert()])
        await until(lambda: kept.tries and removed.tries)
        await outbox.configure([repaired, added])
        outbox.put([make_alert()])
        await until(lambda: repaired.received and added.received)
        outbox.put([])
        await until(lambda: len(repaired.received) == len(added.received) == 2)

    with_outbox(work, kept, removed)
    assert (kept.received, removed.received, removed.tries) == ([], [], 1)
    assert repaired.received == added.received == [FIRED, RESOLVED]


def queues(outbox: Outbox) -> list[ReceiverQueue]:
    return list(outbox._queues.values())


def test_silenced_alert_is_queued_when_its_silence_ends():
    receiver, silenced = Recorder(), {"a"}

    async def work(outbox: Outbox) -> None:
        assert [notice.alert for notice in outbox.put([make_alert(), make_alert("b")])] == [make_alert("b")]
        await until(lambda: receiver.received)
        silenced.clear()
        outbox.put([make_alert(), make_alert("b")])
        await until(lambda: len(receiver.received) == 2)

    with_outbox(work, receiver, is_silenced=lambda alert: dict(alert.labels)["alertname"] in silenced)
    assert receiver.received == [("firing", "b"), FIRED]


def test_alert_that_is_silenced_while_it_is_queued_is_not_sent():
    receiver, silenced = Recorder(), set[str]()
    receiver.failing = TemporaryFailure("connection", "down")

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert("b"), make_alert(), make_alert("c")])
        await until(lambda: receiver.tries)
        silenced.add("a")
        tries = receiver.tries
        await until(lambda: receiver.tries >= tries + 2)  # an attempt may have begun before the silence
        receiver.failing = None
        await until(lambda: len(receiver.received) == 2)
        outbox.put([make_alert("b"), make_alert("c")])
        silenced.clear()
        outbox.put([make_alert("b"), make_alert(), make_alert("c")])
        await until(lambda: len(receiver.received) == 3)

    with_outbox(work, receiver, is_silenced=lambda alert: dict(alert.labels)["alertname"] in silenced)
    assert receiver.received == [("firing", "b"), ("firing", "c"), FIRED]


def test_known_alert_is_not_sent_again_while_it_is_silenced_and_sent_when_it_resolves():
    manager, silenced = Recorder(resend_seconds=0.005), set[str]()

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert(), make_alert("b")])
        await until(lambda: manager.received.count(FIRED) > 1)
        silenced.add("a")
        await until(lambda: manager.received[-1] == ("firing", "b"))
        before = manager.received.count(FIRED)
        sent = manager.received.count(("firing", "b"))
        outbox.put([make_alert(), make_alert("b")], {make_alert().labels: make_alert()})
        await until(lambda: manager.received.count(("firing", "b")) > sent + 3)
        assert manager.received.count(FIRED) == before
        outbox.put([make_alert("b")])
        await until(lambda: RESOLVED in manager.received)

    with_outbox(work, manager, is_silenced=lambda alert: dict(alert.labels)["alertname"] in silenced)


def test_batch_is_as_small_as_its_receiver_requires():
    receiver, sizes = Recorder(), list[int]()
    receiver.batch_limit = 2

    async def send(raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        sizes.append(len(raised))

    receiver.send = send  # type: ignore[method-assign]

    async def work(outbox: Outbox) -> None:
        outbox.put([make_alert(name) for name in "abcde"])
        await until(lambda: sum(sizes) == 5)

    with_outbox(work, receiver)
    assert sizes == [2, 2, 1]
