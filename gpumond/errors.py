"""What can go wrong, as types.

* GpumondError
  - ConfigError         bad configuration or command line: exit code 2
  - SourceUnavailable   no driver, no permission: the daemon retries, `/-/ready` answers 503
  - ProtocolError       a peer sent nonsense: it is closed and counted
  - FlushError          a flush cannot start; its subclasses are the HTTP answers
    · NoSuchTarget, AlreadyUnderWay, CoolingDown
  - NoSuchDevice        a name that no device has: HTTP 404
  - AmbiguousDevice     a name that several devices have: HTTP 422
  - StoreUnavailable    a change cannot be kept, so it was not made: HTTP 503, or 507 on a full disk
  - NoSuchRule          the store has no rule of that name
  - RuleChanged         the rule is no longer the one that the caller meant: HTTP 412
  - RuleConflict        the rule cannot be changed in that way: HTTP 409
  - NoSuchBaseline      there is no baseline of that name, or nothing to compare it with: HTTP 404
  - TooManyBaselines    one has to be deleted first: HTTP 409
  - DaemonError         a command could not reach the daemon, or it answered with a problem: exit code 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NewType

FaultKind = Literal[
    "library_not_found",
    "library_not_loadable",
    "no_driver",
    "no_device",
    "driver_not_loaded",
    "uninitialized",
    "no_permission",
    "device_access_lost",
    "lib_rm_version_mismatch",
    "timeout",
    "crashed",
    "starting",
    "released",
    "left_out",
    "gpu_is_lost",
    "gpu_not_found",
    "reset_required",
    "vanished",
    "lost",
    "processes_hidden",
    "impossible_value",
    "claim_over_driver",
    "insufficient_size",
    "unreadable",
    "unknown",
    "corrupt",
    "row_unreadable",
    "not_writable",
    "damaged",
    "unset",
    "missing",
]
"""Kinds of faults, each with a remedy in ``remedies.FAULTS``."""

ReturnCode = NewType("ReturnCode", str)
"""A return code of NVML in lower case, such as ``corrupted_inforom``, or ``error_NUMBER``; NVML may add more."""


class GpumondError(Exception):
    """Base of all errors that gpumond raises on purpose."""


class ConfigError(GpumondError):
    """A value from a file, the environment or the command line cannot be used."""


class SourceUnavailable(GpumondError):
    """A device source cannot be opened.

    ``reason`` is the kind of the fault; the message ends with the remedy.
    """

    def __init__(self, reason: FaultKind | ReturnCode, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ProtocolError(GpumondError):
    """A frame that is not what design.md section 8 allows. ``reason`` is one word for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FlushError(GpumondError):
    """A flush that cannot start; nothing was done."""


class NoSuchTarget(FlushError):
    """No connected agent matches the target."""


class AlreadyUnderWay(FlushError):
    """The process is being flushed right now."""


class CoolingDown(FlushError):
    """The process was flushed a moment ago; the message says when it may be flushed again."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoSuchDevice(GpumondError):
    """No device has that name; the message lists the devices."""


class AmbiguousDevice(GpumondError):
    """Several devices have that name; the message lists them."""


class StoreUnavailable(GpumondError):
    """The store cannot commit; nothing was changed. ``full``: for want of space."""

    def __init__(self, message: str, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class NoSuchRule(GpumondError):
    """The store has no rule of that name."""


class RuleChanged(GpumondError):
    """The rule's etag is not the one that was asked for."""


class RuleConflict(GpumondError):
    """The rule is read-only, or is there already; the message says what to do instead."""


class NoSuchBaseline(GpumondError):
    """No baseline of that name, or nothing to compare it with; the message says how to get one."""


class TooManyBaselines(GpumondError):
    """The store keeps no more."""


class DaemonError(GpumondError):
    """The daemon cannot be reached, or refused. ``status`` is the HTTP status, 0 if there was no answer.

    ``problem`` is the problem document that it answered, if it did.
    """

    def __init__(self, message: str, status: int = 0, problem: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem or {}
