"""PyTorch's record of allocations, which an administrator can turn on for a time, and live memory by its stacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumond.model.program import Call, Site
from gpumond.protocol.messages import clean

MAX_ENTRIES = 10_000
"""Number of recorded allocations and frees. The copy of the record holds the GIL: 2 ms were measured for 2,000. The
first copy also imports ``torch._inductor``, as PyTorch looks for compiled code among the frames: 4 s of the agent's
thread.
"""
MAX_CALLS = 12
MAX_FILE, MAX_FUNCTION = 160, 80
Stack = tuple[tuple[str, int, str], ...]


def start(memory: Any) -> None:
    """Record Python stacks only: those of C++ would take longer to unwind."""
    memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=MAX_ENTRIES)


def stop(memory: Any) -> None:
    memory._record_memory_history(enabled=None)


def sites(segments: Iterable[Mapping[str, Any]]) -> tuple[Sequence[Site], int]:
    """Return live memory by the stack that allocated it, largest first, and the bytes of blocks without a stack."""
    found: dict[Stack, list[int]] = {}
    unrecorded = 0
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            stack = _stack(block.get("frames") or ())
            if not stack:
                unrecorded += block["size"]
                continue
            total = found.setdefault(stack, [0, 0])
            total[0] += block["size"]
            total[1] += 1
    ordered = sorted(found.items(), key=lambda entry: -entry[1][0])
    return [Site(size, blocks, tuple(_call(*call) for call in stack)) for stack, (size, blocks) in ordered], unrecorded


def _stack(frames: Iterable[Mapping[str, Any]]) -> Stack:
    calls = ((frame["filename"], int(frame["line"]), frame["name"]) for frame in frames)
    return tuple(call for call in calls if _is_python(call[0]))[:MAX_CALLS]


def _is_python(file: str) -> bool:
    """Return whether a stack names the program's Python source, ``<stdin>`` included, and not C++."""
    return file.endswith(".py") or (file.startswith("<") and not file.startswith("<frozen "))


def _call(file: str, line: int, function: str) -> Call:
    return Call(clean(file[-MAX_FILE:]), max(0, line), clean(function[-MAX_FUNCTION:]))
