"""Declared engines: the newest state of each, read in tasks of their own, so a hanging engine delays nothing.

A request goes to the declared address only, without redirects, proxies or an Origin header.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast
from urllib.parse import urlsplit

from gpumond.devices.process.procfs import user_name
from gpumond.facts.engines import NOT_READ, EngineProcess, EngineReading, EngineState
from gpumond.facts.errors import ConfigError, EngineError, EngineTimeout, HttpError, HttpFailure
from gpumond.facts.program import ProcessKey
from gpumond.features.engines.ownership import EngineProcesses, find_processes
from gpumond.features.engines.settings import AuthConfig, EngineConfig
from gpumond.features.engines.spec import Address, EngineRequest, EngineResponse, Exchange, T
from gpumond.host.files import read_secret
from gpumond.host.http import Connection, HttpRequest, exchange_async, tls_context
from gpumond.host.machine import available_bytes
from gpumond.host.tasks import cancel_all

MAX_RESPONSE_BYTES = 2 << 20
CONNECTION_HINTS: Mapping[tuple[str, HttpFailure], str] = {
    ("http", "not_http"): "; if the server uses TLS, set an https:// url",
    ("https", "tls"): "; if the server has no TLS, set an http:// url",
    ("https", "certificate"): "; set ca_file, and server_name if the certificate has another name",
}
"""What resolves a failure, by the scheme of the address and the reason."""


async def carry_out(engine: EngineConfig, exchange: Exchange[T], seconds: float) -> T:
    """Return the result of an exchange. Raises EngineError.

    ``seconds`` limits all calls together. When it is over, the exchange receives EngineTimeout, and the calls with
    which it responds have their own time limits. Answers are decoded in a thread, which delays nothing else.
    """
    deadline = time.monotonic() + seconds
    answer: EngineResponse | None = None
    error: EngineError | None = None
    while True:
        request, result = await asyncio.to_thread(_advance, exchange, answer, error)
        if request is None:
            return cast("T", result)
        remaining_seconds = deadline - time.monotonic()
        limit_seconds = request.seconds or remaining_seconds
        if not (error and request.seconds):
            limit_seconds = min(remaining_seconds, limit_seconds)
        answer, error = None, None
        try:
            answer = await send(engine, request, max(0.001, limit_seconds))
        except EngineError as failure:
            error = failure


def _advance(
    exchange: Exchange[T], answer: EngineResponse | None, error: EngineError | None
) -> tuple[EngineRequest | None, T | None]:
    """Return the next call, or the result of the exchange."""
    try:
        return exchange.throw(error) if error else next(exchange) if answer is None else exchange.send(answer), None
    except StopIteration as done:
        return None, done.value


async def send(engine: EngineConfig, request: EngineRequest, seconds: float) -> EngineResponse:
    """Return the answer to one request. Raises EngineError, and EngineTimeout after ``seconds``."""
    address = engine.metrics_address if request.of_metrics and engine.metrics_address else engine.address
    body = None if request.body is None else json.dumps(request.body).encode()
    target = address.prefix + request.path
    headers = {"Accept": "*/*"} | ({} if body is None else {"Content-Type": "application/json"})
    try:
        headers |= _credentials(engine.auth, request.method, urlsplit(target).path, body or b"")
        http_request = HttpRequest(request.method, target, headers, body)
        answer = await exchange_async(_connection(engine, address), http_request, seconds, MAX_RESPONSE_BYTES)
    except ConfigError as error:
        raise EngineError(str(error)) from None
    except HttpError as error:
        if error.reason == "timeout":
            path = urlsplit(request.path).path
            raise EngineTimeout(f"no response to {request.method} {path} within {seconds:.3g} s") from None
        hint = CONNECTION_HINTS.get((address.scheme, error.reason), "")
        raise EngineError(f"{address}: {error}{hint}") from None
    return EngineResponse(answer.status, answer.body)


def _connection(engine: EngineConfig, address: Address) -> Connection:
    if address.scheme == "unix":
        return Connection("localhost", socket_path=address.host)
    tls = tls_context(engine.ca_file) if address.scheme == "https" else None
    return Connection(address.host, address.port, tls=tls, server_name=engine.server_name)


def _credentials(auth: AuthConfig | None, method: str, path: str, body: bytes) -> Mapping[str, str]:
    if auth is None:
        return {}
    if auth.bearer_token_file:
        return {"Authorization": f"Bearer {read_secret(auth.bearer_token_file)}"}
    if auth.password_file:
        pair = f"{auth.username}:{read_secret(auth.password_file)}"
        return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
    if auth.header and auth.header_file:
        return {auth.header: read_secret(auth.header_file)}
    if auth.hmac_key_file:
        return hmac_headers(
            read_secret(auth.hmac_key_file), method, path, body, str(int(time.time())), secrets.token_hex(16)
        )
    return {}


def hmac_headers(key: str, method: str, path: str, body: bytes, timestamp: str, nonce: str) -> Mapping[str, str]:
    """Return the headers of TensorRT-LLM's runtime control: an HMAC-SHA256 of request, time and nonce."""
    lines = "\n".join(("trtllm-runtime-control-v1", method, path, timestamp, nonce, ""))
    digest = hmac.new(key.encode(), lines.encode() + body, hashlib.sha256).hexdigest()
    name = "x-trtllm-runtime-control"
    return {f"{name}-auth": f"sha256={digest}", f"{name}-timestamp": timestamp, f"{name}-nonce": nonce}


log = logging.getLogger(__name__)

POLL_SECONDS = 10.0
FIRST_READING_PAUSE_SECONDS = 0.5
READ_TIMEOUT_SECONDS = 8.0
"""Limit of one read. Ollama may delay its answer by 5 s while a model is unloaded."""
MAX_MODELS = 1000
STATE_FIELDS = (
    "models",
    "running",
    "waiting",
    "kv_cache_bytes",
    "kv_cache_used_ratio",
    "sleeping",
    "paused",
    "held_bytes",
)
"""Values of a reading that the engine states."""

GpuProcesses = Callable[[], Mapping[ProcessKey, float | None] | None]
"""Function that returns the processes that the driver lists, with their idle times in seconds, as far as it reports
their use of a device; None before its first reading.
"""


def next_quiet_seconds(
    before: EngineState | None, now: EngineState, quiet_seconds: float, elapsed_seconds: float
) -> float:
    """Return the time without a sign of a request, ``elapsed_seconds`` after the state before."""
    if now.requests or now.obstacle or before is None or before.work != now.work:
        return 0.0
    return quiet_seconds + elapsed_seconds


def idle_seconds(state: EngineState, quiet_seconds: float, driver_idle_seconds: Sequence[float | None]) -> float | None:
    """Return the idle time of an engine: the shorter of what it states and of what the driver states for its processes.

    None if the engine does not state its running requests, and the driver not the use of all its processes.
    """
    known_seconds = [seconds for seconds in driver_idle_seconds if seconds is not None]
    if state.requests is None and (not known_seconds or len(known_seconds) < len(driver_idle_seconds)):
        return None
    return min([quiet_seconds, *known_seconds])


class _Engine:
    """One declared engine and its task."""

    def __init__(self, declaration: EngineConfig) -> None:
        self.declaration = declaration
        self.state: EngineState | None = None
        self.read_at = 0.0
        self.problem = NOT_READ
        self.processes = EngineProcesses()
        self.quiet_seconds = 0.0
        self.pinned_uid: int | None = None
        self.out_of_service: tuple[float, str] | None = None
        """Since when it has been out of service, as monotonic time, and why its return has failed."""
        self.task: asyncio.Task[None] | None = None

    def listener_problem(self, processes: EngineProcesses) -> str:
        """Return the reason why nothing is sent to this listener; empty if it is the one that is meant."""
        user, uid = self.declaration.user, processes.uid
        if user is None and not self.declaration.trusts_the_first_listener:
            return ""
        if uid is None:
            return processes.problem or "the user that listens at the engine's address is unknown"
        if user is not None:
            is_expected = user in (user_name(uid), str(uid))
            return "" if is_expected else f"the engine's listener belongs to uid {uid}, not to {user}"
        if self.pinned_uid in (None, uid):
            return ""
        return (
            f"the engine's listener belongs to uid {uid}, and the earlier one to uid {self.pinned_uid}: no secret is "
            "sent; set user:, or reload the configuration after a change"
        )

    def record_state(self, state: EngineState, now: float) -> None:
        elapsed_seconds = now - self.read_at if self.state else 0.0
        self.quiet_seconds = next_quiet_seconds(self.state, state, self.quiet_seconds, elapsed_seconds)
        self.state, self.read_at, self.problem = state, now, ""
        if self.declaration.trusts_the_first_listener and self.pinned_uid is None:
            self.pinned_uid = self.processes.uid

    def record_problem(self, problem: str) -> None:
        if not self.problem:
            log.warning("engine %s: %s", self.declaration.name, problem)
        self.state, self.quiet_seconds, self.problem = None, 0.0, problem

    def reading(self, now: float, driver_idle_seconds: Mapping[ProcessKey, float | None]) -> EngineReading:
        """Return its newest reading. ``driver_idle_seconds``: idle times of processes, as the driver states them."""
        declaration, state, processes = self.declaration, self.state, self.processes
        method = declaration.release_method
        reading = EngineReading(
            name=declaration.name,
            kind=declaration.kind,
            up=state is not None,
            problem=self.problem,
            processes=tuple(EngineProcess(*key) for key in sorted(processes.processes)),
            processes_problem=processes.problem,
            uid=processes.uid,
            pinned_uid=self.pinned_uid,
            methods=(method.name,) if method else (),
            out_of_service_seconds=now - self.out_of_service[0] if self.out_of_service else None,
            out_of_service_reason=self.out_of_service[1] if self.out_of_service else "",
        )
        if state is None:
            return reading
        return replace(
            reading,
            age_seconds=now - self.read_at,
            idle_seconds=idle_seconds(
                state, self.quiet_seconds, [driver_idle_seconds.get(key) for key in processes.processes]
            ),
            **{name: getattr(state, name) for name in STATE_FIELDS},
        )


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
            self._start_polling(engine)

    def configure(self, declarations: Sequence[EngineConfig]) -> None:
        """Replace the declared engines; an unchanged one keeps its state."""
        earlier, self._engines = self._engines, {}
        for declaration in declarations:
            previous = earlier.get(declaration.name)
            if previous is not None and previous.declaration == declaration:
                self._engines[declaration.name] = earlier.pop(declaration.name)
            else:
                self._engines[declaration.name] = engine = _Engine(declaration)
                self._start_polling(engine)
        for engine in earlier.values():
            if engine.task:
                engine.task.cancel()

    async def close(self) -> None:
        await cancel_all(engine.task for engine in self._engines.values() if engine.task)

    def declaration(self, name: str) -> EngineConfig | None:
        engine = self._engines.get(name)
        return engine.declaration if engine else None

    def readings(self) -> tuple[EngineReading, ...]:
        """Return the newest reading of each engine."""
        now, driver_idle_seconds = time.monotonic(), (self._gpu_processes() if self._gpu_processes else None) or {}
        return tuple(engine.reading(now, driver_idle_seconds) for engine in self._engines.values())

    def set_out_of_service(self, name: str, since: float | None, problem: str = "") -> None:
        """Note that an engine is being returned to service since a time of the monotonic clock; None: no longer."""
        if name in self._engines:
            self._engines[name].out_of_service = None if since is None else (since, problem)

    async def read(self, name: str) -> EngineState:
        """Read one engine now. Raises EngineError."""
        engine = self._engine(name)
        declaration = engine.declaration
        try:
            state = await carry_out(declaration, declaration.spec.read(declaration), READ_TIMEOUT_SECONDS)
        except EngineError as error:
            engine.record_problem(str(error))
            raise
        if len(state.models) > MAX_MODELS:
            engine.record_problem(f"the engine lists more than {MAX_MODELS:,} models")
            raise EngineError(engine.problem)
        engine.record_state(state, time.monotonic())
        return state

    async def find_processes(self, name: str, candidates: Iterable[ProcessKey]) -> EngineProcesses:
        """Return the processes of one engine among the candidates."""
        engine = self._engine(name)
        processes = await asyncio.to_thread(find_processes, engine.declaration.address, list(candidates), self._proc)
        if problem := engine.listener_problem(processes):
            processes = EngineProcesses(uid=processes.uid, problem=problem)
        engine.processes = processes
        return processes

    async def carry_out(self, name: str, exchange: Exchange[T], seconds: float) -> T:
        """Carry out an exchange with one engine. Raises EngineError."""
        return await carry_out(self._engine(name).declaration, exchange, seconds)

    async def available_host_bytes(self, processes: Iterable[ProcessKey]) -> int | None:
        """Return the bytes of host memory that these processes can still allocate; None if unknown."""
        return await asyncio.to_thread(available_bytes, [key.pid for key in processes], self._proc)

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines:  # a reload has removed it
            raise EngineError(f"no engine {name} is configured")
        return self._engines[name]

    def _start_polling(self, engine: _Engine) -> None:
        if self._gpu_processes is not None:
            engine.task = asyncio.ensure_future(self._poll(engine, self._gpu_processes))

    async def _poll(self, engine: _Engine, gpu_processes: GpuProcesses) -> None:
        name = engine.declaration.name
        while (candidates := gpu_processes()) is None:
            await asyncio.sleep(FIRST_READING_PAUSE_SECONDS)
        while self._engines.get(name) is engine:
            try:
                processes = await self.find_processes(name, candidates)
                if problem := engine.listener_problem(processes):
                    engine.record_problem(problem)
                else:
                    await self.read(name)
            except EngineError:
                pass  # the reading states it
            except Exception:
                engine.record_problem("the engine's state couldn't be read; see the daemon's log")
                log.exception("engine %s: the read failed", name)
            await asyncio.sleep(self._poll_seconds)
            candidates = gpu_processes() or {}
