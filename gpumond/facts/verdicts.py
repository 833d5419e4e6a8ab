"""Kinds of verdicts, which ``diagnosis/`` decides. No I/O.

Metrics, rules, the API, the web UI, the command line and docs/reference/verdicts.md derive from the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AT_PEAK_CONDITION = "if usage returns to the recent peak"
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
    """One kind of verdict. ``evidence`` lists its numbers. Only the kinds with a ``remedy`` indicate a problem.

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


VERDICT_KINDS = (
    VerdictKind(
        name="warm-up",
        meaning="the first five minutes after the start or a large fall, or growth since then that is slowing down",
        evidence="`level_bytes`",
        is_pattern=True,
    ),
    VerdictKind(
        name="steady",
        meaning="in the last 15 minutes, or since a more recent start, memory has varied by at most 256 MiB or 1% of "
        "the device's size, whichever is larger (2% if there is no trend)",
        evidence="`level_bytes`, `range_bytes`",
        is_pattern=True,
    ),
    VerdictKind(
        name="churn",
        meaning="within ten minutes, memory rises and falls at least six times each, by more than 2% of the device's "
        "size each time",
        evidence="`ups`, `downs`, `low_bytes`, `high_bytes`",
        is_pattern=True,
    ),
    VerdictKind(
        name="periodic",
        meaning="memory rises and falls at regular intervals of 3 to 60 minutes",
        evidence="`period_seconds`, `low_bytes`, `high_bytes`",
        is_pattern=True,
    ),
    VerdictKind(
        name="step-change",
        meaning="memory has changed from one steady amount to another, by at least 5% of the device's size",
        evidence="`step_bytes`",
        is_pattern=True,
    ),
    VerdictKind(
        name="filling",
        meaning="memory has grown by at least 512 MiB in at least 15 minutes, and the growth is slowing down, as when "
        "a cache fills",
        evidence="`slope_bytes_per_second`, `growth_bytes`, `exponent` (1: a straight line), `full_seconds` (until the "
        "device is full)",
        is_pattern=True,
    ),
    VerdictKind(
        name="growing",
        meaning="memory has grown linearly for about two minutes, beyond the process's previous peak: a suspected leak",
        evidence="`slope_bytes_per_second`, `growth_bytes`, `kept_bytes_per_step`, `held_growth_bytes`, "
        "`live_allocations_per_minute`, `live_allocations_growth_ratio`",
    ),
    VerdictKind(
        name="leak",
        meaning="memory has grown without slowing down for longer than healthy growth usually lasts: 60 minutes with "
        "the agent, 90 minutes without it, or less in clear cases",
        evidence="as for `growing`, without `kept_bytes_per_step`; also `window_seconds`, `significance`, `processes`, "
        "`devices`, `outside_pools`, `device_peak_bytes` (in 15 minutes)",
        remedy="find out what retains the memory: gpumond why --pid PID; restart the program before the GPU is full",
    ),
    VerdictKind(
        name="fragmentation",
        meaning="in the last hour, live memory peaked at less than three quarters of the peak of live and stranded "
        "memory, which is at least 5% of the device's size; in addition, that peak has grown, or an allocation was "
        "retried in the last ten minutes",
        evidence="`fragmentation_ratio`, `peak_live_bytes`, `peak_kept_bytes` (live and stranded), `kept_growth_bytes`",
        remedy="set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before PyTorch 2.11) or, "
        "outside PyTorch, choose an asynchronous allocator; then restart the program",
    ),
    VerdictKind(
        name="pressure",
        meaning="more than 95% of the device is used; or more than 80% is used, and growth will fill it within ten "
        "minutes",
        evidence="`used_ratio`, `free_bytes`",
        remedy="flush the GPU (gpumond flush --device INDEX), reduce a program's batch size or an engine's "
        "memory fraction (--gpu-memory-utilization, --mem-fraction-static), or stop a program",
    ),
    VerdictKind(
        name="orphan",
        meaning="the driver attributes memory to no running process: at least 512 MiB and 1% of the device's size, "
        "unchanged for a minute (on a busy device, at least 2%, unchanged for five minutes)",
        evidence="`unattributed_bytes` or `held_bytes`, `unchanged_seconds`",
        remedy="if a program allocates managed memory through RMM, Numba or CuPy's memory pool, start it with gpumond "
        "run; otherwise, stop the process that has the GPU open (fuser -v /dev/nvidia*), or reset the GPU",
    ),
    VerdictKind(
        name="idle-holder",
        meaning="a process has used at least 5% of a device's memory for half an hour without GPU activity",
        evidence="`idle_seconds`, `held_bytes`",
        remedy="stop the program, flush it (gpumond flush --pid PID) or, if it's suspendable, suspend it "
        "(gpumond suspend --pid PID)",
    ),
    VerdictKind(
        name="crash",
        meaning="an unhandled out-of-memory error ended the process; or the process ended without a normal exit, "
        "within three minutes of a failed allocation or an Xid error, or while it filled an almost full device",
        evidence="`released_bytes`",
        remedy="read the program's log; look for Xid errors in dmesg",
    ),
    VerdictKind(
        name="memory-freed",
        meaning="a running process has freed most of its memory",
        evidence="`released_bytes`",
    ),
    VerdictKind(
        name="crash-loop",
        meaning="a program has crashed at least three times on one device within an hour",
        evidence="`crashes`",
        remedy="reduce the program's memory use (a smaller batch or model), or stop whatever restarts it; then read "
        "its log",
    ),
)

VERDICT_NAMES = frozenset(kind.name for kind in VERDICT_KINDS)
PATTERN_NAMES = tuple(kind.name for kind in VERDICT_KINDS if kind.is_pattern)
PROBLEM_KINDS = tuple(kind for kind in VERDICT_KINDS if kind.remedy)
VERDICT_REMEDIES: Mapping[str, str] = {kind.name: kind.remedy for kind in PROBLEM_KINDS}
