"""Records of which a kind of serving engine consists. No I/O: a kind states its requests as a dialogue.

A dialogue is a generator. It yields a Call, receives the Answer or an EngineError, and returns its result;
``connection`` carries it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from gpumond.facts.engines import EngineState
from gpumond.facts.errors import EngineError, EngineRejected
from gpumond.facts.messages import clean
from gpumond.facts.pools import ENGINE_STEP, Expected

T = TypeVar("T")

Scheme = Literal["http", "https", "unix"]
NAME_LENGTH = 200
MAX_INTEGER = 1 << 63


class Address(NamedTuple):
    """An IP address with its port, or the path of a Unix socket; ``prefix`` precedes the path of each request."""

    scheme: Scheme
    host: str
    port: int = 0
    prefix: str = ""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """Secrets by file, read at each use: at most one of them."""

    bearer_token_file: Path | None = None
    username: str = ""
    password_file: Path | None = None
    header: str = ""
    header_file: Path | None = None
    hmac_key_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointers:
    """JSON pointers (RFC 6901) into the answer to a generic engine's read; empty if the engine does not report it."""

    running: str = ""
    waiting: str = ""
    work: str = ""
    models: str = ""
    asleep: str = ""
    held_bytes: str = ""
    kv_cache_bytes: str = ""
    kv_cache_used_ratio: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generic:
    """Requests of an engine that the configuration describes."""

    read: Call
    pointers: Pointers
    release: Call | None = None
    wake: Call | None = None
    ends_holder: bool = False
    moves_to_host: bool = True
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """An engine as the configuration declares it. ``models``: those that may be released, also pinned ones; empty for
    all that are not pinned.
    """

    name: str
    kind: str
    address: Address
    metrics_address: Address | None = None
    auth: Auth = Auth()
    ca_file: Path | None = None
    server_name: str | None = None
    user: str | None = None
    allow: tuple[str, ...] = ()
    lever: str = ""
    wake: bool = True
    models: tuple[str, ...] = ()
    generic: Generic | None = None

    @property
    def trusts_the_first_listener(self) -> bool:
        """True if its secret is sent to a listener that neither ``user`` nor a certificate names."""
        return self.auth != Auth() and self.user is None and self.address.scheme != "https"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. ``reads``: it changes nothing. ``seconds``: its time limit; None for the one of the whole dialogue.

    ``of_metrics``: it is sent to the address of the metrics, if there is one of their own.
    """

    method: str
    path: str
    body: Any = None
    seconds: float | None = None
    of_metrics: bool = False


def get(path: str, of_metrics: bool = False, **query: str) -> Call:
    return Call(method="GET", path=_with(path, query), of_metrics=of_metrics)


def post(path: str, body: Any = None, seconds: float | None = None, **query: str) -> Call:
    return Call(method="POST", path=_with(path, query), body=body, seconds=seconds)


def _with(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query, quote_via=quote)}" if query else path


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body. Raises EngineError if it is not JSON, or has a number that is not finite or above 2^63."""
        try:
            return json.loads(self.body, parse_float=_float, parse_int=_int, parse_constant=_float)
        except (ValueError, RecursionError):
            raise EngineError("its answer is not JSON: is the kind of the engine correct?") from None

    def accepted(self) -> Answer:
        """Return the answer. Raises EngineRejected unless its status is 2xx."""
        if not 200 <= self.status < 300:
            text = clean(self.body[: 4 * NAME_LENGTH].decode("utf-8", "replace"))[:NAME_LENGTH]
            raise EngineRejected(self.status, "; ".join(filter(None, (text, REMEDIES.get(self.status)))))
        return self


REMEDIES = {401: "declare its key with auth:", 403: "check the key that auth: declares"}
"""What resolves a rejection, by status."""


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) < MAX_INTEGER:
        raise ValueError("not finite, or too large")
    return value


def _int(text: str) -> int:
    value = int(text)
    if abs(value) >= MAX_INTEGER:
        raise ValueError("too large")
    return value


Dialogue = Generator[Call, Answer, T]


def at(value: Any, *path: str | int, kind: type | tuple[type, ...] = object) -> Any:
    """Return a part of a JSON value; None if it is absent or of another type. True and False are no numbers."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value if isinstance(value, kind) and not (isinstance(value, bool) and kind not in (bool, object)) else None


def entries(value: Any, *path: str | int) -> list[Any]:
    """Return a list in a JSON value; empty if there is none."""
    found: list[Any] = at(value, *path, kind=list) or []
    return found


def name_of(value: object) -> str:
    """Return a name from an answer, safe to print."""
    return clean(str(value))[:NAME_LENGTH]


Estimate = Callable[[Declaration, EngineState, int], Expected]
"""Bytes that the driver will count less, of an engine that holds so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One way to release an engine's memory.

    ``release`` returns the names of what it released, which ``undo`` receives. ``check`` returns the reason why it must
    not be used now, or nothing. ``stops_service``: from the call on, the engine does not serve until ``undo``, which
    may be repeated, and ``serves`` states whether it serves again. ``ends_holder``: the process that holds the memory
    ends. ``waits``: the engine itself completes running requests first. ``moves_to_host``: weights move to the memory
    of the machine. ``serves_again``: the way in which the engine serves again. ``call_seconds``, ``settle_seconds``:
    limits of the call, and of the time after it until the driver counts the memory as free.
    """

    name: str
    release: Callable[[Declaration, EngineState], Dialogue[tuple[str, ...]]]
    serves_again: str
    estimate: Estimate
    undo: Callable[[Declaration, tuple[str, ...]], Dialogue[None]] | None = None
    check: Callable[[Declaration, EngineState], Dialogue[str]] | None = None
    stops_service: bool = False
    serves: Callable[[EngineState, tuple[str, ...]], bool] = lambda state, released: state.serves
    ends_holder: bool = False
    waits: bool = False
    moves_to_host: bool = False
    call_seconds: float = 30.0
    settle_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A kind of engine. The first lever is the default; ``lever_of`` returns one that depends on the declaration.

    ``warning``: the risk that the user accepts with ``allow: [engine]``; empty if the levers are
    allowed by the declaration alone. ``without_levers``: the reason why there are none.
    """

    kind: str
    summary: str
    read: Callable[[Declaration], Dialogue[EngineState]]
    levers: tuple[Lever, ...] = ()
    lever_of: Callable[[Declaration], Lever | None] | None = None
    warning: str = ""
    without_levers: str = ""

    def lever(self, engine: Declaration) -> Lever | None:
        """Return the lever that the declaration allows, or None."""
        if ENGINE_STEP not in engine.allow:
            return None
        if self.lever_of is not None:
            return self.lever_of(engine)
        return next((lever for lever in self.levers if engine.lever in ("", lever.name)), None)


CONTEXT_BYTES = 1 << 30
"""Memory that stays with a process that sleeps: context, libraries, CUDA graphs. Reports range from 0.8 to 1.2 GiB."""


def all_of_it(declaration: Declaration, state: EngineState, used: int) -> Expected:
    """Estimate for an engine whose process ends: all its bytes, and at least those that it states itself."""
    return Expected(min(used, state.held_bytes or 0), used, used, "interval")


def all_but_contexts(declaration: Declaration, state: EngineState, used: int) -> Expected:
    return Expected(0, max(0, used - CONTEXT_BYTES), used, "interval")


def unknown_part(declaration: Declaration, state: EngineState, used: int) -> Expected:
    """Estimate for memory whose size the engine does not report."""
    return Expected(0, 0, used, "interval")
