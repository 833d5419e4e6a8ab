"""Frames: one JSON object a line, between agent and daemon (socket) and collector and daemon (pipe).

A frame is a frozen dataclass on both ends. Decoding checks every field against the class's own
annotations, so that what comes out is well-typed or is a ProtocolError that says where it is not.
Keys that a class does not know are ignored: an older peer can read a newer one.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from json.encoder import encode_basestring_ascii as _text_json
from sys import float_info
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gpumond.errors import ProtocolError
from gpumond.model.pools import Expected, FlushPolicy, HostPool, Outcome, PoolUsage, StepResult
from gpumond.model.program import SILENT, AppliedLimit, ByteChange, Dump, Ending, Program

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT = 256
MAX_INTEGER = 2**63

T = TypeVar("T")

Asked = Literal["limit", "snapshot"]


@dataclass(frozen=True, slots=True)
class Hello:
    """The agent's first frame. ``workload`` is at most 64 characters of ``[A-Za-z0-9._/-]``.

    ``answers`` are the kinds of Ask that it understands and the program allows; a daemon sends it no other.
    """

    workload: str = ""
    agent_version: str = ""
    python_version: str = ""
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The agent's allocators, once a second."""

    flush_policy: FlushPolicy = "allow"
    frameworks: tuple[str, ...] = ()
    pools: tuple[PoolUsage, ...] = ()
    program: Program = SILENT
    host_pools: tuple[HostPool, ...] = ()


@dataclass(frozen=True, slots=True)
class FlushCommand:
    """The daemon asks for one allocator of the process to be flushed, or (dry_run) for its plan."""

    id: str
    allocator: str
    steps: tuple[str, ...]
    dry_run: bool = False
    timeout_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The daemon waits no longer for this flush: if it has not begun, it must not."""

    id: str


@dataclass(frozen=True, slots=True)
class PoolChange:
    """One pool around a flush; ``expected`` was computed from ``before``'s moment."""

    before: PoolUsage
    after: PoolUsage
    expected: Expected
    raced: bool = False


@dataclass(frozen=True, slots=True)
class FlushResult:
    """The agent's answer to a Flush."""

    id: str
    outcome: Outcome
    reason: str = ""
    pools: tuple[PoolChange, ...] = ()
    steps: tuple[StepResult, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """The daemon asks for a soft quota (``limit_bytes`` None: no more) or for the framework's own memory snapshot."""

    id: str
    kind: Asked
    limit_bytes: int | None = None
    device_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class AgentResponse:
    """The agent's answer to an Ask. ``reason`` says why nothing was done."""

    id: str
    reason: str = ""
    limits: tuple[AppliedLimit, ...] = ()
    dump: Dump | None = None


@dataclass(frozen=True, slots=True)
class Bye:
    """The agent leaves on purpose. ``ending``: how the program ends; None if it goes on, or if that is unknown."""

    ending: Ending | None = None


Message = Hello | Report | FlushCommand | Cancel | FlushResult | AgentRequest | AgentResponse | Bye
MESSAGES: Mapping[str, type[Message]] = {
    "hello": Hello,
    "report": Report,
    "flush": FlushCommand,
    "cancel": Cancel,
    "result": FlushResult,
    "ask": AgentRequest,
    "answer": AgentResponse,
    "bye": Bye,
}
_NAMES = {cls: name for name, cls in MESSAGES.items()}


def encode(message: Message) -> bytes:
    """The frame, with its newline."""
    frame = {"v": VERSION, "type": _NAMES[type(message)], **_fields(message)}
    if not isinstance(message, Report):
        return to_json(frame) + b"\n"
    del frame["pools"]
    pools = ",".join(map(_pool_json, message.pools)).encode("ascii")
    return b'%b,"pools":[%b]}\n' % (to_json(frame)[:-1], pools)


def decode(frame: bytes) -> Message:
    """The message of one frame. Raises ProtocolError."""
    body = _object(frame)
    if body.get("v") != VERSION:
        raise ProtocolError("version", f"frame version {body.get('v')!r}, expected {VERSION}")
    kind = body.get("type")
    message = MESSAGES.get(kind) if isinstance(kind, str) else None
    if message is None:
        raise ProtocolError("type", f"unknown frame type {kind!r:.64}")
    decoded: Message = _convert(message, body, str(kind))
    return decoded


def to_json(value: object) -> bytes:
    """Compact JSON; dataclasses become objects with their field names as keys."""
    return _TO_JSON.encode(value).encode("ascii")


def from_json(cls: type[T], line: bytes) -> T:
    """A dataclass from its JSON object. Raises ProtocolError."""
    decoded: T = _convert(cls, _object(line), cls.__name__)
    return decoded


def clean(value: object) -> str:
    """Any text, made safe to send, to log and to show: printable, at most ``MAX_TEXT`` characters."""
    text = str(value)[:MAX_TEXT]
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


SERVICE_SOCKET = "/run/gpumond/agent.sock"


def default_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where daemon and agents meet if nobody says otherwise; None if this user has no directory of his own."""
    return SERVICE_SOCKET if os.geteuid() == 0 else own_socket(environ)


def own_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where a daemon of this user alone would be: in the runtime directory or, without one, below the home."""
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "gpumond", "agent.sock")
    home = environ.get("HOME")
    return os.path.join(home, ".local", "state", "gpumond", "agent.sock") if home else None


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


_TO_JSON = json.JSONEncoder(default=_fields, separators=(",", ":"))


def _pool_json(pool: PoolUsage) -> str:
    """As `to_json` says it, in a fifth of the time: a report is little else, and a program pays for it each second."""
    flush = pool.reclaimable
    inside = "null" if pool.inside is None else _text_json(pool.inside)
    optional = (
        f'"peak_live_bytes":{pool.peak_live_bytes},"peak_held_bytes":{pool.peak_held_bytes},"ooms":{pool.ooms}'
        f',"retries":{pool.retries},"device_allocations":{pool.device_allocations},"device_frees":{pool.device_frees}'
        f',"thrashes":{pool.thrashes},"spillable_bytes":{pool.spillable_bytes}'
    )
    return (
        f'{{"allocator":{_text_json(pool.allocator)},"device_uuid":{_text_json(pool.device_uuid)},"inside":{inside}'
        f',"live_bytes":{pool.live_bytes},"held_bytes":{pool.held_bytes},"stranded_bytes":{pool.stranded_bytes}'
        f',"held_known":{"true" if pool.held_known else "false"},"reclaimable":{{"low":{flush.low}'
        f',"likely":{flush.likely},"high":{flush.high},"exactness":"{flush.exactness}"}}'
        f",{optional.replace('None', 'null')}}}"
    )


def _object(line: bytes) -> dict[str, Any]:
    try:
        body = _JSON.decode(line.decode())  # UTF-8 alone
    except (ValueError, RecursionError) as error:
        raise ProtocolError("json", f"not a JSON object: {clean(error)}") from None
    if not isinstance(body, dict):
        raise ProtocolError("json", f"expected a JSON object, got {type(body).__name__}")
    return body


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("duplicate key")
    return body


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)

Converter = Callable[[Any], Any]


class _Misfit(Exception):
    """A value of another type. It learns on its way out where it is: to build that for each value would cost more than
    all the checks."""

    def __init__(self, reason: str, says: str) -> None:
        super().__init__(reason, says)
        self.reason, self.says, self.path = reason, says, ""


def _convert(cls: Any, body: dict[str, Any], name: str) -> Any:
    try:
        return _converter(cls)(body)
    except _Misfit as misfit:
        raise ProtocolError(misfit.reason, f"{name}{misfit.path}{misfit.says}") from None


def _compile(hint: Any) -> Converter:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if is_dataclass(hint):
        return _dataclass_converter(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _literal_converter(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_converter(_converter(arguments[0]))
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional_converter(_converter(arguments[0]))
    raise TypeError(f"no JSON form for {hint}")


def _dataclass_converter(cls: Any) -> Converter:
    hints = get_type_hints(cls)
    converters = [(field.name, _converter(hints[field.name])) for field in fields(cls)]
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]

    def convert(value: Any) -> Any:
        if type(value) is not dict:
            raise _mismatch("an object", value)
        for name in required:
            if name not in value:
                raise _Misfit("missing", f".{name} is missing")
        found = {}
        try:
            for name, to in converters:
                if name in value:
                    found[name] = to(value[name])
        except _Misfit as misfit:
            misfit.path = f".{name}{misfit.path}"
            raise
        return cls(**found)

    return convert


def _tuple_converter(item: Converter) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not list:
            raise _mismatch("an array", value)
        return tuple([item(entry) for entry in value])

    return convert


def _optional_converter(inner: Converter) -> Converter:
    return lambda value: None if value is None else inner(value)


def _literal_converter(allowed: tuple[Any, ...]) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not str or value not in allowed:
            raise _mismatch(f"one of {', '.join(allowed)}", value)
        return value

    return convert


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_INTEGER:
        raise _mismatch("an integer from 0 to 2^63-1", value)
    return value


def _change(value: Any) -> int:
    if type(value) is not int or not -MAX_INTEGER < value < MAX_INTEGER:
        raise _mismatch("an integer between -2^63 and 2^63", value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= float_info.max:  # no NaN, and no integer that is no float
        raise _mismatch("a finite number", value)
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise _mismatch(f"printable text of at most {MAX_TEXT} characters", value)
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _mismatch("true or false", value)
    return value


_SCALARS: dict[Any, Converter] = {int: _integer, ByteChange: _change, float: _number, str: _text, bool: _flag}
_converter: Callable[[Any], Converter] = cache(_compile)
"""Checks and converts a decoded JSON value to a type; compiled once per annotation."""


def _mismatch(expected: str, value: Any) -> _Misfit:
    return _Misfit("value", f": expected {expected}, got {clean(repr(value)[:80])}")
