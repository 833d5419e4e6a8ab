"""The agent's settings: what the program has passed to `gpumond.agent.start`, else what the environment states."""

from __future__ import annotations

import os
from collections.abc import Callable

TYPE_CHECKING = False  # an import of typing would add to the cost of each start
if TYPE_CHECKING:
    from gpumond.facts.pools import FlushPolicy

Hook = tuple[Callable[[], "int | None"], "int | Callable[[], int | None] | None"]
"""A function of the program that frees memory, and an estimate of the bytes: a number, a function, or None."""

FLUSH_POLICIES: tuple[FlushPolicy, ...] = ("allow", "step", "never")
MAX_WORKLOAD_LENGTH = 128


class AgentSettings:
    """They may change at any time. The agent's thread reads them when it needs them."""

    def __init__(self, hooks: list[Hook], end_functions: list[Callable[[], object]]) -> None:
        self.hooks, self.end_functions = hooks, end_functions
        self.workload = _clean_workload(os.environ.get("GPUMOND_WORKLOAD", ""))
        policy = os.environ.get("GPUMOND_FLUSH_POLICY", "")
        self.flush_policy: FlushPolicy = next((name for name in FLUSH_POLICIES if name == policy), "allow")
        self.socket: str | None = None
        self.main_thread = os.environ.get("GPUMOND_MAIN_THREAD") == "1"
        self.allow_limit = os.environ.get("GPUMOND_ALLOW_LIMIT") == "1"
        self.suspendable = os.environ.get("GPUMOND_SUSPENDABLE") == "1"

    def change(
        self,
        workload: str | None,
        flush_policy: FlushPolicy | None,
        socket: str | None,
        main_thread: bool | None,
        allow_limit: bool | None,
        suspendable: bool | None,
    ) -> None:
        """Change the settings that are not None, or none of them. Raises TypeError and ValueError."""
        if workload is not None:
            workload = workload_name(workload)
        if flush_policy is not None and flush_policy not in FLUSH_POLICIES:
            raise ValueError(f"flush_policy: expected one of {', '.join(FLUSH_POLICIES)}, got {flush_policy!r}")
        if socket is not None:
            if not isinstance(socket, str):
                raise TypeError(f"socket: expected a path as str, got {type(socket).__name__}")
            if not socket or "\0" in socket:
                raise ValueError("socket: expected the path of a Unix socket")
        flags = {
            "main_thread": main_thread,
            "allow_limit": allow_limit,
            "suspendable": suspendable,
        }
        for name, flag in flags.items():
            if flag is not None and not isinstance(flag, bool):
                raise TypeError(f"{name}: expected True or False, got {type(flag).__name__}")
        changes = {"workload": workload, "flush_policy": flush_policy, "socket": socket, **flags}
        for name, value in changes.items():
            if value is not None:
                setattr(self, name, value)


def workload_name(text: str) -> str:
    """Return the text as a name: without surrounding space, at most 128 characters, with ``_`` for each that is not
    printable. Raises TypeError, and ValueError for an empty name.
    """
    if not isinstance(text, str):
        raise TypeError(f"workload: expected str, got {type(text).__name__}")
    name = _clean_workload(text)
    if not name:
        raise ValueError("workload: expected a name, got an empty string")
    return name


def _clean_workload(text: str) -> str:
    return "".join(char if char.isprintable() else "_" for char in text.strip()[:MAX_WORKLOAD_LENGTH]).strip()
