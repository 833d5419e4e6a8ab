"""Declared engines: the newest state of each, read in tasks of their own, so that a hanging engine delays nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpumond.engines import spec_of
from gpumond.engines.connection import carry_out
from gpumond.engines.host_memory import available_bytes
from gpumond.engines.ownership import Owned, owned
from gpumond.engines.spec import Declaration, Dialogue, Lever, T
from gpumond.errors import EngineError
from gpumond.model.engines import NOT_READ, EngineProcess, EngineReading, EngineState
from gpumond.model.process import ProcessKey
from gpumond.sources.process.procfs import user_name

log = logging.getLogger(__name__)

POLL_SECONDS = 10.0
FIRST_FRAME_SECONDS = 0.5
READ_SECONDS = 8.0
"""Limit of one read. Ollama may delay its answer by 5 s while a model is unloaded."""

GpuProcesses = Callable[[], Iterable[ProcessKey] | None]
"""Function that returns the processes that the driver lists; None before its first reading."""


def idle_seconds(before: EngineState | None, now: EngineState, idle: float | None, seconds: float) -> float | None:
    """Return the time without a request, ``seconds`` after the state before; None if requests are not observable.

    It is 0 after a request, or a change of the counters.
    """
    if now.requests is None and now.work is None:
        return None
    if now.requests or before is None or before.work != now.work:
        return 0.0
    return (idle or 0.0) + seconds


class _Engine:
    """One declared engine and its task."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.state: EngineState | None = None
        self.read_at = 0.0
        self.problem = NOT_READ
        self.owned = Owned()
        self.idle: float | None = None
        self.task: asyncio.Task[None] | None = None

    def keep(self, state: EngineState, now: float) -> None:
        seconds = now - self.read_at if self.state else 0.0
        self.idle = idle_seconds(self.state, state, self.idle, seconds)
        self.state, self.read_at, self.problem = state, now, ""

    def lose(self, problem: str) -> None:
        if not self.problem:
            log.warning("engine %s: %s", self.declaration.name, problem)
        self.state, self.idle, self.problem = None, None, problem


class Engines:
    """The declared engines. ``poll_seconds``: the pause between two reads of one engine."""

    def __init__(self, poll_seconds: float = POLL_SECONDS, proc: str = "/proc") -> None:
        self._poll_seconds, self._proc = poll_seconds, proc
        self._engines: dict[str, _Engine] = {}
        self._gpu_processes: GpuProcesses | None = None

    def start(self, gpu_processes: GpuProcesses) -> None:
        """Begin to read the engines. The first read follows the driver's first reading."""
        self._gpu_processes = gpu_processes
        for engine in self._engines.values():
            self._begin(engine)

    def configure(self, declarations: Sequence[Declaration]) -> None:
        """Replace the declared engines; an unchanged one keeps its state."""
        before, self._engines = self._engines, {}
        for declaration in declarations:
            known = before.get(declaration.name)
            if known is not None and known.declaration == declaration:
                self._engines[declaration.name] = before.pop(declaration.name)
            else:
                self._engines[declaration.name] = engine = _Engine(declaration)
                self._begin(engine)
        for engine in before.values():
            _end(engine)

    async def close(self) -> None:
        tasks = [engine.task for engine in self._engines.values() if engine.task]
        for engine in self._engines.values():
            _end(engine)
        await asyncio.gather(*tasks, return_exceptions=True)

    def declaration(self, name: str) -> Declaration | None:
        engine = self._engines.get(name)
        return engine.declaration if engine else None

    def readings(self) -> tuple[EngineReading, ...]:
        """Return the newest reading of each engine."""
        now = time.monotonic()
        return tuple(_reading(engine, now) for engine in self._engines.values())

    async def read(self, name: str) -> EngineState:
        """Read one engine now. Raises EngineError."""
        engine = self._engines[name]
        spec = spec_of(engine.declaration.kind)
        try:
            state = await carry_out(engine.declaration, spec.read(engine.declaration), READ_SECONDS)
        except EngineError as error:
            engine.lose(str(error))
            raise
        engine.keep(state, time.monotonic())
        return state

    async def owned(self, name: str, candidates: Iterable[ProcessKey]) -> Owned:
        """Return the processes of one engine among the candidates."""
        engine = self._engines[name]
        found = await asyncio.to_thread(owned, engine.declaration.address, list(candidates), self._proc)
        user = engine.declaration.user
        if user is not None and found.uid is not None and user not in (user_name(found.uid), str(found.uid)):
            found = Owned(uid=found.uid, problem=f"its listener belongs to uid {found.uid}, not to {user}")
        engine.owned = found
        return found

    async def carry_out(self, name: str, dialogue: Dialogue[T], seconds: float) -> T:
        """Carry out a dialogue with one engine. Raises EngineError."""
        return await carry_out(self._engines[name].declaration, dialogue, seconds)

    async def host_memory(self, processes: Iterable[ProcessKey]) -> int | None:
        """Return the bytes of host memory that these processes can still allocate; None if unknown."""
        return await asyncio.to_thread(available_bytes, [key.pid for key in processes], self._proc)

    def _begin(self, engine: _Engine) -> None:
        if self._gpu_processes is not None:
            engine.task = asyncio.ensure_future(self._poll(engine, self._gpu_processes))

    async def _poll(self, engine: _Engine, gpu_processes: GpuProcesses) -> None:
        name = engine.declaration.name
        while (candidates := gpu_processes()) is None:
            await asyncio.sleep(FIRST_FRAME_SECONDS)
        while True:
            try:
                found = await self.owned(name, candidates)
                if engine.declaration.user is not None and found.problem:
                    engine.lose(found.problem)  # no secret is sent to a listener of another user
                else:
                    await self.read(name)
            except EngineError:
                pass  # the reading states it
            except Exception:
                engine.lose("its state could not be read; see the log of the daemon")
                log.exception("engine %s: the read failed", name)
            await asyncio.sleep(self._poll_seconds)
            candidates = gpu_processes() or ()


def _end(engine: _Engine) -> None:
    if engine.task:
        engine.task.cancel()


def lever_of(declaration: Declaration) -> Lever | None:
    return spec_of(declaration.kind).lever(declaration)


def _reading(engine: _Engine, now: float) -> EngineReading:
    declaration, state = engine.declaration, engine.state
    lever = lever_of(declaration)
    known: Mapping[str, object] = {}
    if state is not None:
        known = {
            "models": state.models,
            "running": state.running,
            "waiting": state.waiting,
            "kv_cache_bytes": state.kv_cache_bytes,
            "kv_cache_used_ratio": state.kv_cache_used_ratio,
            "asleep": state.asleep,
            "held_bytes": state.held_bytes,
            "age_seconds": now - engine.read_at,
        }
    return EngineReading(
        name=declaration.name,
        kind=declaration.kind,
        up=state is not None,
        problem=engine.problem,
        idle_seconds=engine.idle,
        processes=tuple(EngineProcess(*key) for key in sorted(engine.owned.processes)),
        processes_problem=engine.owned.problem,
        uid=engine.owned.uid,
        levers=(lever.name,) if lever else (),
        **known,  # type: ignore[arg-type]
    )
