"""Messages, one JSON object per line, between agent and daemon (socket) and device child and daemon (pipe).

A message is a frozen dataclass on both ends. The decoder checks each field against the annotations of the class: the
result is well-typed, or a ProtocolError states the field. Unknown keys are ignored: an older peer can read the messages
of a newer one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from sys import float_info
from typing import Any, Literal, TypeVar

from gpumond.facts.errors import ProtocolError
from gpumond.facts.fast_dataclass import fast_dataclass
from gpumond.facts.pools import ExpectedRelease, FlushOutcome, FlushPolicy, HostPool, PoolUsage, StepResult
from gpumond.facts.program import (
    EMPTY_PROGRAM,
    AllocationSite,
    AppliedLimit,
    ByteChange,
    Dump,
    Ending,
    LiveClasses,
    PoolLimit,
    Program,
)
from gpumond.facts.typed_json import ABSENT, Converter, Mismatch, Validator

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT_LENGTH = 256
MAX_WORKLOAD_LENGTH = 128
MAX_INTEGER = 2**63

T = TypeVar("T")

RequestKind = Literal["limit", "snapshot", "classes", "fetch", "retainers", "end"]


@dataclass(frozen=True, slots=True)
class Hello:
    """The agent's first message. ``workload`` is at most ``MAX_WORKLOAD_LENGTH`` printable characters.

    ``answers`` are the kinds of AgentRequest that it understands and the program allows; a daemon sends it no other.
    ``admission``: the id with which `gpumond run --need` started the program, or empty.
    ``rank`` and ``world_size``: those of a job of several processes, else both are None. ``job``: its identity on all
    machines, at most 128 characters of ``[A-Za-z0-9._/-]``, or empty. ``account``: its Slurm account, in the same form.
    """

    workload: str = ""
    agent_version: str = ""
    python_version: str = ""
    answers: tuple[str, ...] = ()
    admission: str = ""
    rank: int | None = None
    world_size: int | None = None
    job: str = ""
    account: str = ""


@fast_dataclass(frozen=True, slots=True)
class Report:
    """The agent's allocators, once a second.

    ``components``: what was seen in the program that takes device memory outside of its pools (``nccl``, ``graphs``,
    ``triton``), or shares it with other processes (``ipc``). ``resume_signals``: signals SIGCONT that the agent has
    received for the program. ``suspendable``: the program allows the daemon to suspend it now.
    """

    flush_policy: FlushPolicy = "allow"
    frameworks: tuple[str, ...] = ()
    pools: tuple[PoolUsage, ...] = ()
    program: Program = EMPTY_PROGRAM
    host_pools: tuple[HostPool, ...] = ()
    limits: tuple[PoolLimit, ...] = ()
    components: tuple[str, ...] = ()
    resume_signals: int = 0
    suspendable: bool = False


@dataclass(frozen=True, slots=True)
class FlushCommand:
    """The daemon's request to flush one allocator of the process, or (dry_run) to plan the flush.

    ``allocator`` is empty for the step ``hooks`` of a program that reports no pool.
    """

    id: str
    allocator: str
    steps: tuple[str, ...]
    dry_run: bool = False
    timeout_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class CancelFlush:
    """The daemon no longer waits for this flush. If it has not started, it must not."""

    id: str


@dataclass(frozen=True, slots=True)
class PoolChange:
    """One pool before and after a flush; ``expected`` was computed from ``before``."""

    before: PoolUsage
    after: PoolUsage
    expected: ExpectedRelease
    raced: bool = False


@dataclass(frozen=True, slots=True)
class FlushResult:
    """The agent's response to a FlushCommand."""

    id: str
    outcome: FlushOutcome
    reason: str = ""
    pools: tuple[PoolChange, ...] = ()
    steps: tuple[StepResult, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """The daemon's request for a limit (``limit_bytes`` None: remove it), for the framework's own memory snapshot, for
    the classes of live bytes, for a part of a snapshot's file (``fetch``), for a search of the lines that keep memory
    (``retainers``), whose result is in later reports, or for the end of the program by its own function.

    ``record_seconds``: record the allocator's history for this time before the snapshot and the classes. ``quota``: the
    quota that sets the limit; the agent's reports state it.
    """

    id: str
    kind: RequestKind
    limit_bytes: int | None = None
    device_uuid: str | None = None
    record_seconds: float | None = None
    snapshot_id: int | None = None
    offset: int = 0
    quota: str = ""


@dataclass(frozen=True, slots=True)
class AgentResponse:
    """The agent's response to an AgentRequest. ``reason`` explains why nothing was done.

    With ``classes``, it explains why some are unknown. ``paused_seconds``: the longest time for which their reading has
    paused the program. ``age_seconds``: that of the classes, as of an earlier request.
    ``sites``, ``unrecorded_bytes`` (live bytes that were allocated before) and ``folded`` (the file of all stacks) are
    results of a recording.
    ``part`` has bytes of a file, compressed with zlib, in Base64; ``part_bytes`` is their number before compression,
    ``file_bytes`` the size of the file.
    """

    id: str
    reason: str = ""
    limits: tuple[AppliedLimit, ...] = ()
    dump: Dump | None = None
    classes: tuple[LiveClasses, ...] = ()
    sites: tuple[AllocationSite, ...] = ()
    unrecorded_bytes: int = 0
    folded: Dump | None = None
    part: tuple[str, ...] = ()
    part_bytes: int = 0
    file_bytes: int | None = None
    paused_seconds: float = 0.0
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BorrowRequest:
    """The agent's request for room on a device, after an allocation of ``size_bytes`` has failed.

    ``device_uuid`` is empty if the agent does not know the device.
    """

    id: str
    size_bytes: int
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class BorrowResponse:
    """The daemon's response to a BorrowRequest, within two seconds: what flushes of other programs have released.

    ``fits``: the device has room for the request now. ``reason`` explains why nothing was flushed.
    """

    id: str
    fits: bool
    released_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The agent disconnects on purpose. ``ending``: how the program ends; None if it continues, or if unknown."""

    ending: Ending | None = None


Message = (
    Hello
    | Report
    | FlushCommand
    | CancelFlush
    | FlushResult
    | AgentRequest
    | AgentResponse
    | BorrowRequest
    | BorrowResponse
    | Goodbye
)
MESSAGE_TYPES: Mapping[str, type[Message]] = {
    "hello": Hello,
    "report": Report,
    "flush": FlushCommand,
    "cancel": CancelFlush,
    "result": FlushResult,
    "ask": AgentRequest,
    "answer": AgentResponse,
    "borrow": BorrowRequest,
    "borrowed": BorrowResponse,
    "bye": Goodbye,
}
_TYPE_NAMES = {cls: name for name, cls in MESSAGE_TYPES.items()}


def encode(message: Message) -> bytes:
    """Return the line of a message, with its newline.

    The line states all fields of the message, and of the objects in it those that differ from their default.
    """
    body = {"v": VERSION, "type": _TYPE_NAMES[type(message)], **_fields(message)}
    return _MESSAGE_TO_JSON.encode(body).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of one line. Raises ProtocolError."""
    body = _object(line)
    if body.get("v") != VERSION:
        raise ProtocolError("version", f"message version {body.get('v')!r}, expected {VERSION}")
    kind = body.get("type")
    cls = MESSAGE_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError("type", f"unknown message type {kind!r:.64}")
    decoded: Message = _convert(cls, body, str(kind))
    return decoded


def to_json(value: object) -> bytes:
    """Return compact JSON; dataclasses become objects with their field names as keys."""
    return _TO_JSON.encode(value).encode("ascii")


def from_json(cls: type[T], line: bytes) -> T:
    """Return a dataclass from its JSON object. Raises ProtocolError."""
    decoded: T = _convert(cls, _object(line), cls.__name__)
    return decoded


def printable_text(value: object) -> str:
    """Make any text safe to send, log and display: printable, at most ``MAX_TEXT_LENGTH`` characters."""
    text = str(value)[:MAX_TEXT_LENGTH]
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _non_default_fields(value: Any) -> dict[str, Any]:
    fields = value.__dataclass_fields__.values()
    return {field.name: present for field in fields if (present := getattr(value, field.name)) is not field.default}


_TO_JSON = json.JSONEncoder(default=_fields, separators=(",", ":"))
_MESSAGE_TO_JSON = json.JSONEncoder(default=_non_default_fields, separators=(",", ":"))


def _object(line: bytes) -> dict[str, Any]:
    try:
        body = _JSON.decode(line.decode())  # UTF-8 only
    except (ValueError, RecursionError) as error:
        raise ProtocolError("json", f"not a JSON object: {printable_text(error)}") from None
    if not isinstance(body, dict):
        raise ProtocolError("json", f"expected a JSON object, got {type(body).__name__}")
    return body


def _object_with_unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("duplicate key")
    return body


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} isn't a number")


_JSON = json.JSONDecoder(object_pairs_hook=_object_with_unique_keys, parse_constant=_reject_constant)


def _convert(cls: Any, body: dict[str, Any], name: str) -> Any:
    try:
        return VALIDATOR.converter(cls)(body)
    except Mismatch as mismatch:
        path, expected = f"{name}{mismatch.path}", mismatch.expected
        if not expected:
            raise ProtocolError("missing", f"{path} is missing") from None
        got = printable_text(repr(mismatch.value)[:80])
        raise ProtocolError("value", f"{path}: expected {expected}, got {got}") from None


def _literal_converter(allowed: tuple[Any, ...]) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not str or value not in allowed:
            raise Mismatch(f"one of {', '.join(allowed)}", value)
        return value

    return convert


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_INTEGER:
        raise Mismatch("an integer from 0 to 2^63-1", value)
    return value


def _byte_change(value: Any) -> int:
    if type(value) is not int or not -MAX_INTEGER < value < MAX_INTEGER:
        raise Mismatch("an integer between -2^63 and 2^63", value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= float_info.max:  # no NaN, and no integer beyond the floats
        raise Mismatch("a finite number", value)
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT_LENGTH or not value.isprintable():
        raise Mismatch(f"printable text of at most {MAX_TEXT_LENGTH} characters", value)
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise Mismatch("true or false", value)
    return value


def _default(field: Field[Any], hint: object) -> object:
    """Let the class set its defaults."""
    return MISSING if field.default is MISSING and field.default_factory is MISSING else ABSENT


VALIDATOR = Validator(
    scalars={int: _integer, ByteChange: _byte_change, float: _number, str: _text, bool: _flag},
    literal=_literal_converter,
    default=_default,
    record=lambda cls, found: cls(**found),
    sequence=tuple,
)
"""Checks messages: the result is an instance of the class."""


AGENT_SOCKET = "agent.sock"
SERVICE_SOCKET = f"/run/gpumond/{AGENT_SOCKET}"


def default_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the default path of the socket; None if the user has no directory of its own."""
    return SERVICE_SOCKET if os.geteuid() == 0 else user_socket(environ)


def user_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a daemon for this user alone: in the runtime directory or, without one, below the home."""
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "gpumond", AGENT_SOCKET)
    home = environ.get("HOME")
    return os.path.join(home, ".local", "state", "gpumond", AGENT_SOCKET) if home else None


def program_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path where a program's agent connects: the stated one, else that of the daemon in the stated runtime
    directory or of the user's daemon, if there is one, else that of the service.
    """
    if path := environ.get("GPUMOND_SOCKET"):
        return path
    runtime, user_path = environ.get("GPUMOND_RUNTIME_DIR"), user_socket(environ)
    candidates = (os.path.join(runtime, AGENT_SOCKET) if runtime else None, user_path)
    return next((each for each in candidates if each and os.path.exists(each)), SERVICE_SOCKET)
