"""Start and stop of a daemon: every part is closed whichever fails, and no task, socket or setting remains."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpumond.config.settings import Settings
from gpumond.core import Dependencies
from gpumond.daemon.daemon import Daemon
from gpumond.daemon.server import serve
from gpumond.facts.flush import FlushRequest
from gpumond.facts.frame import Alert
from gpumond.facts.messages import FlushCommand, FlushResult
from gpumond.facts.snapshot import AgentReport
from gpumond.features.alerts.dispatcher import AlertDispatcher, ReceiverOptions
from gpumond.features.rules.registry import RuleRegistry
from gpumond.features.rules.settings import RuleConfig
from gpumond.host.peer import PeerIdentity
from gpumond.host.tasks import background_task
from gpumond.metrics.telemetry import Telemetry
from gpumond.store.store import Store
from tests.helpers.agents import GIB
from tests.helpers.simulated_daemon import SimulatedAgents, SimulatedCollector
from tests.helpers.values import make_pool, make_report
from tests.helpers.world import World

pytestmark = pytest.mark.timeout(60)

FULL = RuleConfig.model_validate({"name": "full", "scope": "device", "value": "used_bytes", "above": 1}).rule()
FLUSHING = RuleConfig.model_validate(
    {
        "name": "release",
        "scope": "device",
        "value": "used_bytes",
        "above": 1,
        "action": {"flush": {"min_reclaimable": "1MiB"}, "cooldown": "1h"},
    }
).rule()


class SilentAgent(SimulatedAgents):
    """One agent that never answers a flush. ``flush_received`` is set when it receives one."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.flush_received = asyncio.Event()
        self.closed = False

    def reports(self) -> tuple[AgentReport, ...]:
        return (make_report(4242, (make_pool("GPU-0", live=GIB, cached=GIB),)),)

    def report(self, identity: PeerIdentity) -> AgentReport | None:
        return self.reports()[0]

    async def flush(self, identity: PeerIdentity, request: FlushCommand) -> FlushResult | None:
        self.flush_received.set()
        await asyncio.Event().wait()
        return None

    def close(self) -> None:
        self.closed = True


class FailingCollector(SimulatedCollector):
    def start(self) -> None:
        raise OSError("no process can be started")

    async def stop(self) -> None:
        raise OSError("no process can be stopped")


def dependencies_of(directory: Path, world: World) -> Dependencies:
    return Dependencies(
        devices=SimulatedCollector(world),
        agents=SilentAgent(world),
        store=Store(directory / "gpumond.db"),
        telemetry=Telemetry(),
    )


def other_tasks() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


def test_parts_are_all_closed_when_the_collector_fails_to_start_and_to_stop(tmp_path: Path):
    async def run() -> None:
        world = World()
        dependencies = replace(dependencies_of(tmp_path, world), devices=FailingCollector(world))
        with pytest.raises(OSError, match="can be stopped") as raised:
            async with Daemon(Settings(), dependencies).running():
                raise AssertionError("the collector has not started")
        assert "can be started" in str(raised.value.__context__)
        assert not other_tasks()

    asyncio.run(run())


def test_agents_and_store_are_closed_when_the_collector_fails_to_stop(tmp_path: Path):
    class Unstoppable(SimulatedCollector):
        async def stop(self) -> None:
            raise OSError("no process can be stopped")

    async def run() -> None:
        world = World()
        dependencies = replace(dependencies_of(tmp_path, world), devices=Unstoppable(world))
        with pytest.raises(OSError, match="can be stopped"):
            async with Daemon(Settings(interval=0.1), dependencies).running():
                pass
        assert isinstance(dependencies.agents, SilentAgent)
        assert dependencies.agents.closed
        assert not other_tasks()

    asyncio.run(run())


def test_rule_flush_interrupted_by_the_stop_is_in_the_audit(tmp_path: Path):
    async def run() -> list[tuple[str, str]]:
        dependencies = dependencies_of(tmp_path, World())
        async with Daemon(Settings(interval=0.1, rules=(FLUSHING,)), dependencies).running():
            assert isinstance(dependencies.agents, SilentAgent)
            await dependencies.agents.flush_received.wait()
        assert not other_tasks()
        store = Store(tmp_path / "gpumond.db")
        await store.open()
        entries = await store.audit_entries()
        await store.close()
        return [(entry.actor, entry.action) for entry in entries]

    entries = asyncio.run(run())
    actions = ("action", "flush.request", "flush.interrupted")
    assert entries == [("rule:release", action) for action in actions]


def test_receiver_is_notified_after_the_frame_is_replaced(tmp_path: Path):
    notified: list[tuple[str, ...]] = []

    class Receiver:
        name, resend_seconds, batch_limit = "receiver", None, 64

        async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
            assert daemon.core.frame is not None
            notified.append(tuple(alert.rule for alert in daemon.core.frame.alerts if alert in raised))

    async def run() -> None:
        nonlocal daemon
        dependencies = replace(
            dependencies_of(tmp_path, World()),
            services={ReceiverOptions: ReceiverOptions(lambda settings: [Receiver()])},
        )
        daemon = Daemon(Settings(interval=1.0, rules=(FULL,)), dependencies)
        async with daemon.started():
            await daemon.tick()
            while not notified:
                await asyncio.sleep(0)

    daemon: Daemon
    asyncio.run(run())
    assert "full" in notified[0]


def test_requests_during_a_tick_are_answered_from_the_previous_frame(tmp_path: Path):
    async def run() -> None:
        world = World()
        daemon = Daemon(Settings(interval=1.0), dependencies_of(tmp_path, world))
        core, listener = daemon.core, socket.create_server(("127.0.0.1", 0))
        answers = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers.append((core.frame, core.history.now))
            writer.close()

        async with daemon.started(), await asyncio.start_server(answer, sock=listener):
            before = (await daemon.tick()).frame
            known = core.history.now
            world.advance()
            tick = asyncio.create_task(daemon.tick())
            while core.history.now == known:
                await asyncio.sleep(0)
            with socket.create_connection(listener.getsockname()):
                while not answers:
                    await asyncio.sleep(0)
            after = (await tick).frame
        (frame, now), *_ = answers
        assert frame is before is not after
        assert now > known

    asyncio.run(run())


def test_frame_is_replaced_before_its_dispatch_is_executed(tmp_path: Path):
    """`decide` has no effect by itself: it sends no notice and starts no flush."""

    class Outbox:
        def put(self, alerts: object, news: object) -> list[object]:
            raise AssertionError("a receiver was notified too early")

    async def flush(request: FlushRequest, requested_by: str) -> object:
        raise AssertionError("nothing is flushed yet")

    async def run() -> None:
        world = World()
        world.advance()
        daemon = Daemon(Settings(rules=(FLUSHING,)), dependencies_of(tmp_path, world))
        tick = await daemon.tick()
        store = Store(tmp_path / "other.db")
        dispatcher = AlertDispatcher(store, Outbox(), flush, 0.0)  # type: ignore[arg-type]
        rules, frame = daemon.core.get(RuleRegistry).rules, tick.frame
        dispatch = dispatcher.decide(rules, frame.alerts, frame.snapshot, tick.alert_states)
        await asyncio.sleep(0)
        assert [order.alert.rule for order in dispatch.orders]
        assert dispatcher.decide(rules, frame.alerts, frame.snapshot, tick.alert_states) == dispatch
        await store.close()
        async with daemon.started():
            pass

    asyncio.run(run())


def settings_of(directory: Path) -> Settings:
    return Settings(listen="127.0.0.1:0", socket=directory / "agent.sock", state_dir=directory / "state", interval=0.1)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUMOND_SIM_DIR", str(tmp_path / "devices"))
    return tmp_path


async def failing(directory: Path) -> None:
    def bound(address: str) -> None:
        raise OSError("the caller has failed")

    with pytest.raises(OSError, match="the caller"):
        await serve(settings_of(directory), "sim", on_listening=bound)


async def cancelled(directory: Path) -> None:
    task = asyncio.create_task(serve(settings_of(directory), "sim"))
    await served(directory)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def stopped(directory: Path) -> None:
    task = asyncio.create_task(serve(settings_of(directory), "sim"))
    await served(directory)
    os.kill(os.getpid(), signal.SIGTERM)
    await task


async def served(directory: Path) -> None:
    while not (directory / "state" / "gpumond.db").exists():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", [failing, cancelled, stopped])
def test_serve_leaves_no_socket_and_no_task(directory: Path, end: Callable[[Path], Awaitable[None]]):
    async def run() -> None:
        await end(directory)
        assert not other_tasks()

    asyncio.run(run())
    assert list(directory.glob("*.sock")) == []


def test_background_task_that_swallows_a_cancellation_is_cancelled_again():
    cancellations = 0

    async def swallow_cancellation() -> None:
        nonlocal cancellations
        while cancellations < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancellations += 1

    async def run() -> None:
        async with background_task(swallow_cancellation()):
            await asyncio.sleep(0)
        assert not other_tasks()

    asyncio.run(run())
    assert cancellations == 2
