"""Records of which a kind of serving engine consists. No I/O: a kind states its requests as an exchange.

An exchange is a generator. It yields an EngineRequest, receives the EngineResponse or an EngineError, and returns its
result; ``poller`` carries it out. `MetricsPage` reads an engine's metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError, EngineRejected
from gpumond.facts.messages import printable_text
from gpumond.facts.pools import ExpectedRelease

if TYPE_CHECKING:
    from gpumond.features.engines.settings import EngineConfig


MAX_LINES = 20_000
MAX_LINE_BYTES = 1024
"""Longer lines are skipped: labels of the samples that are used are names of models and ranks."""
MAX_VALUE = float(1 << 63)

_LINE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+([0-9eE+.-]+)")
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')


class MetricSample(NamedTuple):
    labels: dict[str, str]
    value: float


class MetricsPage:
    """Samples of a page by name. Those that are not finite, or larger than 2^63, are absent.

    Raises EngineError for a page of too many lines.
    """

    def __init__(self, page: bytes) -> None:
        if page.count(b"\n") > MAX_LINES:
            raise EngineError(f"the metrics have more than {MAX_LINES:,} lines: is the engine's kind correct?")
        self._values: dict[str, list[tuple[bytes, float]]] = {}
        for line in page.split(b"\n"):
            if line.startswith(b"#") or len(line) > MAX_LINE_BYTES or not (match := _LINE.match(line)):
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if abs(value) < MAX_VALUE:
                self._values.setdefault(match[1].decode(), []).append((match[2] or b"", value))

    def samples(self, name: str) -> list[MetricSample]:
        parsed = (
            (dict(_LABEL.findall(text.decode("utf-8", "replace"))), value) for text, value in self._labeled_values(name)
        )
        return [MetricSample(labels, value) for labels, value in parsed]

    def total(self, name: str) -> float | None:
        """Return the sum of the samples of this name; None if the page has none."""
        values = self._labeled_values(name)
        return sum(value for _, value in values) if values else None

    def totals(self, *names: str) -> tuple[float, ...] | None:
        """Return the total of each of these names, 0 for one that the page lacks; None if it has none of them."""
        totals = [self.total(name) for name in names]
        return None if all(total is None for total in totals) else tuple(total or 0.0 for total in totals)

    def request_count(self, *names: str) -> int | None:
        """Return the sum of these names' totals as an integer; None if the page has none of them."""
        totals = self.totals(*names)
        return None if totals is None else int(sum(totals))

    def mean(self, *names: str) -> float | None:
        """Return the mean of the samples of the first name that the page has; None if it has none of them."""
        labeled = next(filter(None, map(self._labeled_values, names)), None)
        return None if labeled is None else sum(value for _, value in labeled) / len(labeled)

    def _labeled_values(self, name: str) -> list[tuple[bytes, float]]:
        return self._values.get(name, [])


T = TypeVar("T")

MAX_NAME_LENGTH = 200
MAX_MAGNITUDE = 1 << 63


class Address(NamedTuple):
    """An IP address with its port, or the path of a Unix socket; ``prefix`` precedes the path of each request."""

    scheme: Literal["http", "https", "unix"]
    host: str
    port: int = 0
    prefix: str = ""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request. ``seconds``: its time limit; None for the one of the whole exchange.

    ``of_metrics``: it is sent to the address of the metrics, if there is one of their own.
    """

    method: str
    path: str
    body: Any = None
    seconds: float | None = None
    of_metrics: bool = False


def get(path: str, of_metrics: bool = False, **query: str) -> EngineRequest:
    return EngineRequest(method="GET", path=_with_query(path, query), of_metrics=of_metrics)


def post(path: str, body: Any = None, seconds: float | None = None, **query: str) -> EngineRequest:
    return EngineRequest(method="POST", path=_with_query(path, query), body=body, seconds=seconds)


def _with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query, quote_via=quote)}" if query else path


class EngineResponse(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body. Raises EngineError if it is not JSON, or has a number that is not finite or above 2^63."""
        try:
            return json.loads(self.body, parse_float=_parse_float, parse_int=_parse_int, parse_constant=_parse_float)
        except (ValueError, RecursionError):
            raise EngineError("the response isn't JSON: is the engine's kind correct?") from None

    def raise_for_status(self) -> EngineResponse:
        """Return the answer. Raises EngineRejected unless its status is 2xx."""
        if not 200 <= self.status < 300:
            text = printable_text(self.body[: 4 * MAX_NAME_LENGTH].decode("utf-8", "replace"))[:MAX_NAME_LENGTH]
            raise EngineRejected(self.status, "; ".join(filter(None, (text, REMEDY_BY_STATUS.get(self.status)))))
        return self


REMEDY_BY_STATUS = {401: "set the engine's key with auth:", 403: "check the key in auth:"}
"""What resolves a rejection, by status."""


def _parse_bounded(parse: type[float] | type[int], text: str) -> float:
    value = parse(text)
    if not abs(value) < MAX_MAGNITUDE:
        raise ValueError("not finite, or too large")
    return value


_parse_float, _parse_int = partial(_parse_bounded, float), partial(_parse_bounded, int)


Exchange = Generator[EngineRequest, EngineResponse, T]


def json_part(value: Any, *path: str | int, kind: type | tuple[type, ...] = object) -> Any:
    """Return a part of a JSON value; None if it is absent or of another type. True and False aren't numbers."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value if isinstance(value, kind) and not (isinstance(value, bool) and kind not in (bool, object)) else None


def entries(value: Any, *path: str | int) -> list[Any]:
    """Return a list in a JSON value; empty if there is none."""
    part: list[Any] = json_part(value, *path, kind=list) or []
    return part


def printable_name(value: object) -> str:
    """Return a name from an answer, safe to print."""
    return printable_text(str(value))[:MAX_NAME_LENGTH]


def read_flag(name: str) -> Exchange[bool | None]:
    """Return the answer of a route that states this alone; None from a server without the route."""
    answer = yield get(f"/{name}")
    value: bool | None = json_part(answer.json, name, kind=bool) if answer.status == 200 else None
    return value


CONTEXT_BYTES = 1 << 30
"""Memory that stays with a process that sleeps: context, libraries, CUDA graphs. Reports range from 0.8 to 1.2 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseMethod:
    """One way to release an engine's memory.

    ``release`` returns the names of what it released, which ``undo`` receives. ``check`` returns the reason why it must
    not be used now, or nothing. ``estimate``: see `expected`. ``stops_service``: from the call on, the engine does not
    serve until ``undo``, which may be repeated, and ``serves`` states whether it serves again. ``ends_process``: the
    process that holds the memory ends. ``waits``: the engine itself completes running requests first.
    ``moves_to_host``: weights move to the memory of the machine. ``wake_hint``: the way in which the engine serves
    again. ``call_seconds``, ``settle_seconds``: limits of the call, and of the time after it until the driver counts
    the memory as free.
    """

    name: str
    release: Callable[[EngineConfig, EngineState], Exchange[tuple[str, ...]]]
    wake_hint: str
    estimate: Callable[[EngineConfig, EngineState, int], ExpectedRelease] | None = None
    undo: Callable[[EngineConfig, tuple[str, ...]], Exchange[object]] | None = None
    check: Callable[[EngineConfig, EngineState], Exchange[str]] | None = None
    stops_service: bool = False
    serves: Callable[[EngineState, tuple[str, ...]], bool] = lambda state, released: state.serves
    ends_process: bool = False
    waits: bool = False
    moves_to_host: bool = False
    call_seconds: float = 30.0
    settle_seconds: float = 30.0

    def expected(self, engine: EngineConfig, state: EngineState, used: int) -> ExpectedRelease:
        """Return the bytes that the driver will count less, of an engine whose processes use so many.

        Without an estimate of its own: all of it if the processes end, all but their contexts if the weights move to
        the host, else an unknown part.
        """
        if self.estimate is not None:
            return self.estimate(engine, state, used)
        if not self.ends_process:
            return ExpectedRelease(0, max(0, used - CONTEXT_BYTES) if self.moves_to_host else None, used, "interval")
        models = models_to_unload(engine, state)
        if len(models) == len(state.models):
            return ExpectedRelease(min(used, state.held_bytes or 0), used, used, "interval")
        sizes = [model.size_bytes for model in models if model.size_bytes is not None]
        return ExpectedRelease(0, min(used, sum(sizes)) if len(sizes) == len(models) else None, used, "interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A kind of engine. The first method is the default; ``method_of`` returns one that depends on the declaration.

    ``warning``: the risk that the user accepts with ``allow: [engine]``; empty if the methods are allowed by the
    declaration alone. ``no_methods_reason``: why the kind has no methods. ``config_error`` returns what is wrong with a
    declaration that allows the release; empty if nothing is.
    """

    kind: str
    summary: str
    read: Callable[[EngineConfig], Exchange[EngineState]]
    methods: tuple[ReleaseMethod, ...] = ()
    method_of: Callable[[EngineConfig], ReleaseMethod | None] | None = None
    warning: str = ""
    no_methods_reason: str = ""
    config_error: Callable[[EngineConfig], str] = lambda engine: ""


def send_in_order(*requests: EngineRequest) -> Callable[[EngineConfig, object], Exchange[tuple[str, ...]]]:
    """Return a ``release`` or ``undo`` that sends these requests, each after the one before was accepted."""

    def exchange(engine: EngineConfig, state: object) -> Exchange[tuple[str, ...]]:
        for request in requests:
            (yield request).raise_for_status()
        return ()

    return exchange


def models_to_unload(engine: EngineConfig, state: EngineState) -> tuple[EngineModel, ...]:
    """Return the models to unload: the declared ones, by name or alias; without, those that are not pinned."""
    names = set(engine.models)
    return tuple(
        model for model in state.models if (names & {model.name, *model.aliases} if names else not model.pinned)
    )


def check_model_to_unload(engine: EngineConfig, state: EngineState) -> Exchange[str]:
    """Check that a model can be unloaded."""
    yield from ()
    if models_to_unload(engine, state) or not state.models:
        return ""
    names, any_pinned = ", ".join(model.name for model in state.models), any(model.pinned for model in state.models)
    reason = f"{'pinned with keep_alive, or ' if any_pinned else ''}not listed under models:"
    return f"{names}: {reason}; list them under models: to unload them"


def unload_models(
    request_for: Callable[[EngineModel], EngineRequest],
    reload_name: Callable[[EngineModel], str] = lambda model: model.name,
) -> Callable[[EngineConfig, EngineState], Exchange[tuple[str, ...]]]:
    """Return a ``release`` that sends a request for each model to unload.

    ``reload_name``: the name by which ``undo`` loads the model again.
    """

    def exchange(engine: EngineConfig, state: EngineState) -> Exchange[tuple[str, ...]]:
        models = models_to_unload(engine, state)
        for model in models:
            (yield request_for(model)).raise_for_status()
        return tuple(map(reload_name, models))

    return exchange


def load_models(requests: Mapping[str, EngineRequest]) -> Exchange[None]:
    """Send one request for each model, also after a failure. Raises EngineError."""
    failed = []
    for model, request in requests.items():
        answer = yield request
        if answer.status != 200 and b"already" not in answer.body:  # a request of another program was faster
            failed.append(model)
    if failed:
        raise EngineError(f"{', '.join(failed)}: not loaded; see the server's log")
