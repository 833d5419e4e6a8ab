"""Flusher with real engines, a simulated device as the driver, and no agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from gpumond.facts.flush import FlushRequest, Target
from gpumond.facts.messages import FlushCommand, FlushResult
from gpumond.facts.pools import Receipt
from gpumond.facts.snapshot import AgentReport, Reading
from gpumond.features.engines.flush_step import EngineFlusher, ReleaseTiming
from gpumond.features.engines.poller import Engines
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.flush.flusher import Flusher
from gpumond.host.peer import PeerIdentity
from gpumond.sim.device import SimDevice
from tests.helpers.engines import FakeEngine, reading

FAST = ReleaseTiming(
    idle_seconds=0.2, poll_seconds=0.05, stable_seconds=0.1, settle_seconds=3.0, restore_pause_seconds=(0.1,)
)
BRIEF = replace(FAST, settle_seconds=0.5)
"""For a release that has no effect: its memory is awaited in vain."""


class NoAgents:
    def reports(self) -> Sequence[AgentReport]:
        return ()

    def report(self, identity: PeerIdentity) -> AgentReport | None:
        return None

    async def flush(self, identity: PeerIdentity, request: FlushCommand) -> FlushResult | None:
        return None

    def is_flushing(self, identity: PeerIdentity) -> bool:
        return False


Scenario = Callable[["World"], Awaitable[Any]]


class World:
    """The daemon's parts that flush one engine."""

    def __init__(
        self, card: SimDevice, *declarations: EngineConfig, timing: ReleaseTiming = FAST, use: float | None = 0.0
    ) -> None:
        """``use``: the driver's utilization of the device by each process."""
        self.card, self.use = card, use
        self.kept: list[Receipt] = []
        self.engines = Engines()
        self.engines.configure(declarations)
        self.flusher = Flusher(
            NoAgents(),
            self.read_driver,
            engine_step=EngineFlusher(self.engines, self.read_driver, timing),
            store_receipt=self._keep,
        )

    async def _keep(self, receipt: Receipt) -> None:
        self.kept.append(receipt)

    async def read_driver(self) -> Reading | None:
        (device,) = reading(self.card).devices
        processes = tuple(replace(each, utilization_ratio=self.use) for each in device.processes or ())
        return Reading(devices=(replace(device, processes=processes),))

    async def flush(self, name: str = "e", **fields: Any) -> Receipt:
        (receipt,) = await self.flush_all(name, **fields)
        return receipt

    async def flush_all(self, name: str = "e", **fields: Any) -> Sequence[Receipt]:
        request = FlushRequest(target=Target(workload=name), steps=("engine",), **fields)
        return (await self.flusher.flush(request, "test")).receipts


def flush(card: SimDevice, declaration: EngineConfig, **fields: Any) -> Receipt:
    return asyncio.run(World(card, declaration).flush(**fields))


GENERIC = {"get": "/running", "running": "/requests/active", "work": "/requests/done", "models": "/models~1loaded"}


OPTIONS: dict[str, dict[str, Any]] = {
    "generic": {"state": GENERIC, "release": {"post": "/unload"}},
    "triton": {"models": ["resnet"]},
    "lmdeploy": {"allow": ["engine"]},
    "vllm": {"allow": ["engine"]},
}


def declared(engine: FakeEngine, **fields: Any) -> EngineConfig:
    own = dict(OPTIONS.get(engine.kind, {}))
    if engine.kind == "triton":
        own["metrics_url"] = engine.url
    return engine.declaration(**own | fields)


ALLOWED: dict[str, dict[str, Any]] = {
    "ollama": {},
    "comfyui": {},
    "llama-router": {},
    "a1111": {"allow": ["engine"]},
    "vllm": {"allow": ["engine"]},
    "tensorrt-llm": {"allow": ["engine"]},
    "lmdeploy": {"allow": ["engine"]},
    "triton": {"allow": ["engine"]},
    "generic": {"allow": ["engine"], "release": {"post": "/unload"}, "wake": {"post": "/load"}},
}


def allowed(engine: FakeEngine, **fields: Any) -> EngineConfig:
    return declared(engine, **ALLOWED[engine.kind] | fields)


class Short(World):
    """World whose methods have a time limit of a second."""

    def __init__(self, card: Any, declaration: EngineConfig) -> None:
        super().__init__(card, declaration, timing=BRIEF)
        carry_out = self.engines.carry_out

        async def limited(name: str, exchange: Any, seconds: float) -> Any:
            return await carry_out(name, exchange, min(seconds, 1.0))

        self.engines.carry_out = limited  # type: ignore[method-assign]


SECONDS = 30.0


async def reached(condition: Callable[[], bool]) -> bool:
    """Return True once the condition holds, which a thread examines."""
    end = time.monotonic() + SECONDS
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True
