"""The end of the interpreter, as an exit handler can determine it. Installs no hook."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gpumond.agent.instrument.oom import is_oom
from gpumond.model.program import Ending


def ending() -> Ending | None:
    """Return how the program ends, None if unknown. Call it while exit handlers run.

    Python stores an unhandled exception in `sys.last_value` before it prints it. The status that a program passes to
    `sys.exit` is not visible to an exit handler: such an end is an ``exit``, whatever the status.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        return None  # multiprocessing handles the errors of its children, and passes a status to sys.exit
    error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, KeyboardInterrupt) or hasattr(sys, "ps1"):  # ps1: no error ends a prompt
        return "exit"
    return "out-of-memory" if any(map(is_oom, _chain(error))) else "error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and the errors of a group."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            waiting += (cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ()))
            yield cause
