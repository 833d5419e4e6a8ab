"""Advice on settings and programs, each with the condition under which it applies. No I/O.

Alerts, the events of out-of-memory errors and ``gpumond why`` derive from ``ADVICE``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import LiveClasses, Oom
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot
from gpumond.facts.units import MIB, size_text

NEW_ALLOC_CONF_SINCE = (2, 11)
"""PyTorch 2.9 reads ``PYTORCH_ALLOC_CONF``, but ignores its ``expandable_segments`` for CUDA; 2.11 applies it."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
OLD_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOC_CONF = "PYTORCH_ALLOC_CONF"

FRAGMENTED_RATIO = 0.05
"""Stranded part of a device from which fragmentation is worth a setting."""
UNUSED_RATIO = 0.25
"""Part of a device that an allocator holds without use from which its size is worth a setting."""
LARGE_RATIO = 0.5
"""Part of live bytes from which a class is worth a change."""
MIN_SPLIT_MIB, MAX_SPLIT_MIB = 32, 512
"""Limits of the advised max_split_size_mb. PyTorch rejects 20 and less; above 512 little is protected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceContext:
    """One program on one device. ``reports`` are those of all programs on the device, ``device`` its reading.

    ``oom`` is the record of its newest out-of-memory error, if it had one; ``classes`` those of the record, or newer
    ones. ``retried``: allocations succeeded only after a flush.
    """

    report: AgentReport
    device_uuid: str
    device: DeviceReading | None = None
    reports: Sequence[AgentReport] = ()
    oom: Oom | None = None
    classes: Sequence[LiveClasses] = ()
    retried: bool = False

    @property
    def device_bytes(self) -> int | None:
        return None if self.device is None else self.device.size_bytes

    def pools(self, allocator: str) -> list[PoolUsage]:
        """Return the program's own pools of an allocator on the device."""
        return _pools(self.report, allocator, self.device_uuid)

    def live_classes(self) -> Iterator[LiveClasses]:
        classes = self.classes or (() if self.oom is None else self.oom.classes)
        return (one for one in classes if one.device_uuid == self.device_uuid)


@dataclass(frozen=True, slots=True)
class Advice:
    """``applies`` decides on what was seen, which ``meaning`` describes. ``text`` is one imperative clause."""

    name: str
    meaning: str
    applies: Callable[[AdviceContext], bool]
    text: Callable[[AdviceContext], str]


def context_of(report: AgentReport, device_uuid: str, snapshot: Snapshot, retried: bool = False) -> AdviceContext:
    """Return the context of one program on one device, with its newest out-of-memory error there."""
    ooms = [oom for oom in report.program.ooms if oom.device_uuid in (None, device_uuid)]
    return AdviceContext(
        report=report,
        device_uuid=device_uuid,
        device=snapshot.device(device_uuid),
        reports=snapshot.reports,
        oom=ooms[-1] if ooms else None,
        retried=retried,
    )


def advice_texts(context: AdviceContext) -> list[str]:
    """Return the clauses that apply, most effective first."""
    return [one.text(context) for one in ADVICE if one.applies(context)]


def advice_clauses(context: AdviceContext) -> str:
    """Return the clauses with a leading semicolon each, for the end of a summary; empty without advice."""
    return "".join(f"; {clause}" for clause in advice_texts(context))


def torch_version(frameworks: Sequence[str]) -> tuple[int, int] | None:
    """Return the version of the PyTorch that an agent reports."""
    for framework in frameworks:
        match = re.match(r"torch (\d{1,3})\.(\d{1,3})", framework)
        if match:
            return int(match[1]), int(match[2])
    return None


def torch_setting(frameworks: Sequence[str]) -> str:
    """Return the environment variable that configures the allocator of the PyTorch that an agent reports.

    It is the older name where PyTorch's version is older or unknown: every version reads it.
    """
    version = torch_version(frameworks)
    older = any(name.startswith("torch ") for name in frameworks) and (
        version is None or version < NEW_ALLOC_CONF_SINCE
    )
    return OLD_ALLOC_CONF if older else NEW_ALLOC_CONF


def _pools(report: AgentReport, allocator: str, device_uuid: str) -> list[PoolUsage]:
    return [pool for pool in report.pools if (pool.allocator, pool.device_uuid) == (allocator, device_uuid)]


def _is_fragmented(context: AdviceContext) -> bool:
    """Return whether PyTorch's free memory is in pieces: much is stranded, or a smaller request failed.

    Cached bytes don't count: what is left of them at an error was freed since, or is in expandable segments.
    """
    if context.oom is not None and context.oom.request_bytes is not None:
        pools = [p for p in context.oom.pools if (p.allocator, p.device_uuid) == ("torch", context.device_uuid)]
        if 0 < context.oom.request_bytes <= sum(pool.stranded_bytes for pool in pools):
            return True
    stranded = sum(pool.stranded_bytes for pool in context.pools("torch"))
    return context.device_bytes is not None and stranded >= FRAGMENTED_RATIO * context.device_bytes


def _has_expandable_segments(context: AdviceContext) -> bool:
    """Return whether PyTorch isn't for ROCm. On CUDA, each version that the agent supports has them."""
    return not any(framework.startswith("torch ") and "rocm" in framework for framework in context.report.frameworks)


def _can_sleep(context: AdviceContext) -> bool:
    """Return whether the program has pools of another allocator, as serving engines with a sleep mode do."""
    return any(pool.unmapped_bytes or pool.private_bytes for pool in context.report.pools)


def _max_split_setting(context: AdviceContext) -> str:
    """Return the setting with the MiB of the failed request, so free blocks of at least its size stay whole."""
    request = context.oom.request_bytes if context.oom is not None else None
    size = MAX_SPLIT_MIB if request is None else min(MAX_SPLIT_MIB, max(MIN_SPLIT_MIB, request // MIB))
    return f"max_split_size_mb:{size}"


WHOLE_BLOCK_CHANGES = {
    "cupy": "allocate from cupy.cuda.MemoryAsyncPool",
    "jax": "set XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
    "rmm": "use rmm.mr.CudaAsyncMemoryResource instead of a pool",
    "tensorflow": "set TF_GPU_ALLOCATOR=cuda_malloc_async",
}


def whole_block_change(allocator: str, context: AdviceContext) -> str:
    """Return the change with which an allocator's free memory stays in one piece; empty if none is known."""
    if allocator not in ("torch", "sim"):
        return WHOLE_BLOCK_CHANGES.get(allocator, "")
    name = torch_setting(context.report.frameworks)
    if not _has_expandable_segments(context):
        return f"set {name}={_max_split_setting(context)}"
    return "" if _can_sleep(context) else f"set {name}={EXPANDABLE_SEGMENTS}"


def _is_training(context: AdviceContext) -> bool:
    return any(one.gradients_bytes or one.optimizer_bytes for one in context.live_classes())


def _activations_ratio(context: AdviceContext) -> float:
    """Return the part of live bytes that are activations, with other tensors if these are not distinguished."""
    return _ratio_of_live_bytes(context, lambda one: _unclassified_bytes(one) + (one.activations_bytes or 0))


def _batch_dependent_ratio(context: AdviceContext) -> float:
    """Return the part of live bytes that are other tensors and activations."""
    return _ratio_of_live_bytes(
        context, lambda one: _unclassified_bytes(one) + (one.activations_bytes or 0) + (one.tensors_bytes or 0)
    )


def _unclassified_bytes(one: LiveClasses) -> int:
    """Return the bytes of other tensors and activations as far as they are unknown; 0 while another class is."""
    return 0 if one.buffers_bytes is None else one.unknown_bytes


def _ratio_of_live_bytes(context: AdviceContext, size: Callable[[LiveClasses], int]) -> float:
    classes = list(context.live_classes())
    live = sum(one.live_bytes for one in classes)
    return sum(map(size, classes)) / live if live else 0.0


def _activations_text(context: AdviceContext) -> str:
    unknown = any(_unclassified_bytes(one) for one in context.live_classes())
    return "other tensors and activations" if unknown else "activations"


def _is_short_of_memory(context: AdviceContext) -> bool:
    return context.oom is not None or context.retried


def _programs_with_unused_memory(context: AdviceContext, allocator: str) -> list[tuple[AgentReport, int]]:
    """Return the programs on the device whose allocator holds much that is not in use, with these bytes.

    Where the library does not state what it holds, the driver's count of the process is used.
    """
    programs = []
    for report in context.reports or (context.report,):
        pools = _pools(report, allocator, context.device_uuid)
        live, held = sum(pool.live_bytes or 0 for pool in pools), sum(pool.held_bytes for pool in pools)
        if pools and not all(pool.held_known for pool in pools) and context.device is not None:
            process = context.device.processes_by_key.get(report.key)
            held = max(held, process.used_bytes or 0) if process is not None else held
        if pools and context.device_bytes and held - live >= UNUSED_RATIO * context.device_bytes:
            programs.append((report, held - live))
    return programs


def _preallocates(context: AdviceContext, allocator: str) -> bool:
    return _is_short_of_memory(context) and bool(_programs_with_unused_memory(context, allocator))


def _unused_memory_text(context: AdviceContext, allocator: str) -> str:
    return ", ".join(
        f"{report.workload or 'a program'} (pid {report.pid}), which holds {size_text(size)} unused"
        for report, size in _programs_with_unused_memory(context, allocator)
    )


ADVICE = (
    Advice(
        "expandable-segments",
        "fragmented, with PyTorch on CUDA, without private pools or a sleep mode",
        lambda context: _is_fragmented(context) and _has_expandable_segments(context) and not _can_sleep(context),
        lambda context: f"set {torch_setting(context.report.frameworks)} to {EXPANDABLE_SEGMENTS}",
    ),
    Advice(
        "max-split-size",
        "fragmented, with PyTorch on ROCm",
        lambda context: _is_fragmented(context) and not _has_expandable_segments(context),
        lambda context: f"set {torch_setting(context.report.frameworks)} to {_max_split_setting(context)}",
    ),
    Advice(
        "gradient-checkpointing",
        "short of memory while training, and at least half of the live bytes are activations",
        lambda context: (
            _is_short_of_memory(context) and _is_training(context) and _activations_ratio(context) >= LARGE_RATIO
        ),
        lambda context: (
            "use gradient checkpointing (torch.utils.checkpoint) if the program doesn't already: "
            f"{100 * _activations_ratio(context):.0f}% of the live bytes are {_activations_text(context)}"
        ),
    ),
    Advice(
        "mixed-precision",
        "short of memory while training, and at least half of the live bytes are activations",
        lambda context: (
            _is_short_of_memory(context) and _is_training(context) and _activations_ratio(context) >= LARGE_RATIO
        ),
        lambda context: (
            "use mixed precision (torch.autocast) if the program doesn't already: it halves the size of most "
            "activations"
        ),
    ),
    Advice(
        "smaller-batch",
        "short of memory, and at least half of the live bytes depend on the batch",
        lambda context: _is_short_of_memory(context) and _batch_dependent_ratio(context) >= LARGE_RATIO,
        lambda context: (
            "use a smaller batch, with gradient accumulation to keep the effective batch size"
            if _is_training(context)
            else "use a smaller batch"
        ),
    ),
    Advice(
        "tensorflow-memory-growth",
        "short of memory, and a TensorFlow program holds at least a quarter of the device's memory unused",
        lambda context: _preallocates(context, "tensorflow"),
        lambda context: (
            "set TF_FORCE_GPU_ALLOW_GROWTH=true, or call tf.config.experimental.set_memory_growth(gpu, True) at the "
            f"start of {_unused_memory_text(context, 'tensorflow')}"
        ),
    ),
    Advice(
        "jax-preallocation",
        "short of memory, and a JAX program holds at least a quarter of the device's memory unused",
        lambda context: _preallocates(context, "jax"),
        lambda context: (
            "set XLA_PYTHON_CLIENT_PREALLOCATE=false, or a smaller XLA_CLIENT_MEM_FRACTION (formerly "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION), for {_unused_memory_text(context, 'jax')}"
        ),
    ),
    Advice(
        "rmm-pool-size",
        "short of memory, and an RMM pool holds at least a quarter of the device's memory unused",
        lambda context: _preallocates(context, "rmm"),
        lambda context: (
            "create RMM's pool with a smaller initial_pool_size and maximum_pool_size in "
            f"{_unused_memory_text(context, 'rmm')}"
        ),
    ),
)
"""All advice, most effective first."""
