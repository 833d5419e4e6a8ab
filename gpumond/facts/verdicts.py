"""Kinds of verdicts, which ``diagnosis/`` decides. No I/O.

Metrics, rules, the API, the web UI, the command line and docs/reference/verdicts.md derive from the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AT_PEAK = "if usage returns to the recent peak"
"""Condition of a time to full, in a summary that states another one without it."""

VerdictName = Literal[
    "warm-up",
    "steady",
    "churn",
    "periodic",
    "step-change",
    "filling",
    "growing",
    "leak",
    "fragmentation",
    "pressure",
    "orphan",
    "idle-holder",
    "crash",
    "memory-freed",
    "crash-loop",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictKind:
    """One kind of verdict. ``evidence`` describes its numbers. Only the kinds with a ``remedy`` indicate a problem.

    ``is_pattern``: it describes a healthy pattern, of which at most one applies to a device or process.
    """

    name: VerdictName
    meaning: str
    evidence: str
    remedy: str = ""
    is_pattern: bool = False

    @property
    def rule_value(self) -> str:
        """Name of the value of rules that is 1 while the verdict is active."""
        return self.name.replace("-", "_")


KINDS = (
    VerdictKind(
        name="warm-up",
        meaning="the first five minutes after the start or a large fall, or growth since then that is slowing down",
        evidence="amount",
        is_pattern=True,
    ),
    VerdictKind(
        name="steady",
        meaning="for 15 minutes, or for five since the start, has varied by at most 1% of the device's size (2% "
        "without a trend) or 256 MiB, whichever is larger",
        evidence="amount, range",
        is_pattern=True,
    ),
    VerdictKind(
        name="churn",
        meaning="rises and falls by more than 2% of the device's size, at least six times each in ten minutes",
        evidence="direction changes, low, high",
        is_pattern=True,
    ),
    VerdictKind(
        name="periodic",
        meaning="rises and falls at regular intervals of 3 to 60 minutes",
        evidence="period, low, high",
        is_pattern=True,
    ),
    VerdictKind(
        name="step-change",
        meaning="has changed from one steady amount to another, by at least 5% of the device's size",
        evidence="size of the step",
        is_pattern=True,
    ),
    VerdictKind(
        name="filling",
        meaning="has grown by at least 512 MiB in at least 15 minutes, and the growth is slowing down, as when a "
        "cache fills",
        evidence="slope, growth, exponent of the curve (1 is a line), seconds until the device is full",
        is_pattern=True,
    ),
    VerdictKind(
        name="growing",
        meaning="has grown linearly for about two minutes, beyond the process's previous peak: a suspected leak",
        evidence="slope, growth, bytes retained per step, growth of held bytes and of the live allocation count",
    ),
    VerdictKind(
        name="leak",
        meaning="has grown without slowing down for longer than healthy growth does: 60 minutes with the agent and 90 "
        "without, or less in clear cases",
        evidence="`form` (`linear`, `stairs` or `load-proportional`), slope, growth, significance, window, processes, "
        "devices, `outside_pools`, growth of held bytes and of the live allocation count, the device's highest use in "
        "15 minutes",
        remedy="find out what retains the memory: gpumond why --pid PID; restart the program before the GPU is full",
    ),
    VerdictKind(
        name="fragmentation",
        meaning="the last hour's peak of live and stranded memory was at least 5% of the device's size, and more than "
        "a quarter of it was never live; in addition, the peak has grown, or an allocation had to be retried in the "
        "last ten minutes",
        evidence="fragmented ratio, peak live bytes, peak live and stranded bytes, growth of that peak",
        remedy="set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before PyTorch 2.11) or, "
        "outside PyTorch, choose an asynchronous allocator; then restart the program",
    ),
    VerdictKind(
        name="pressure",
        meaning="more than 95% of the device is used, or more than 80% is used and growth will fill it within ten "
        "minutes",
        evidence="used ratio, free bytes",
        remedy="flush the GPU (gpumond flush --device INDEX), reduce a program's batch size or an engine's "
        "memory fraction (--gpu-memory-utilization, --mem-fraction-static), or stop a program",
    ),
    VerdictKind(
        name="orphan",
        meaning="memory that the driver attributes to no running process, unchanged for a minute: at least 512 MiB and "
        "1% of the device's size; while the device is busy, 2% and five minutes",
        evidence="bytes, seconds",
        remedy="if it is managed memory (cudaMallocManaged), start its program with gpumond run; otherwise, stop the "
        "process that has the GPU open (fuser -v /dev/nvidia*), or reset the GPU",
    ),
    VerdictKind(
        name="idle-holder",
        meaning="has used at least 5% of a device's memory for half an hour without GPU activity",
        evidence="bytes, seconds",
        remedy="stop the program, flush it (gpumond flush --pid PID) or, if it's suspendable, suspend it "
        "(gpumond suspend --pid PID)",
    ),
    VerdictKind(
        name="crash",
        meaning="an unhandled out-of-memory error terminated the process, or the process exited with another error, or "
        "for an unknown reason, after a failed allocation or an Xid error, or while it filled an almost full device",
        evidence="bytes",
        remedy="read the program's log; look for Xid errors in dmesg",
    ),
    VerdictKind(
        name="memory-freed",
        meaning="a running process has freed most of its memory",
        evidence="bytes",
    ),
    VerdictKind(
        name="crash-loop",
        meaning="one program has crashed three times on one device within an hour",
        evidence="count",
        remedy="reduce the program's memory use (a smaller batch or model), or stop whatever restarts it; then read "
        "its log",
    ),
)

VERDICTS = frozenset(kind.name for kind in KINDS)
PATTERNS = tuple(kind.name for kind in KINDS if kind.is_pattern)
PROBLEMS = tuple(kind for kind in KINDS if kind.remedy)
REMEDIES: Mapping[str, str] = {kind.name: kind.remedy for kind in PROBLEMS}
