"""Remedies of an out-of-memory error by arithmetic: what each would have made available, and how that is known. No I/O.

``REMEDIES`` is their order: a wrong setting first, then memory that nobody uses, then changes of the program.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpumond.diagnosis.advice import ADVICE, AdviceContext, context_of, whole_block_change
from gpumond.diagnosis.failed_allocation import FailedAllocation
from gpumond.diagnosis.sentences import program_text
from gpumond.events import program_line_clause
from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import LedgerLine, Verdict
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import CLASS_NAMES, LiveClasses, location_text
from gpumond.facts.quota import GrantedRequest
from gpumond.facts.snapshot import AgentReport, DeviceReading
from gpumond.facts.units import GIB, distinct_size_texts, duration_text, size_text
from gpumond.features.oom.case import Basis, Remedy, effect_order


@dataclass(frozen=True, slots=True)
class NeighborUsage:
    """Bytes that another program on the device holds, and the part that a flush of it returns."""

    report: AgentReport
    held_bytes: int
    reclaimable_bytes: int


@dataclass(frozen=True)  # without slots, for the cached properties
class Evidence(FailedAllocation):
    """A failed allocation, and what else is known.

    ``verdicts`` are those of the frame of the report. ``peak_bytes_by_device``: the maximum of the bytes in use in the
    last minute; a device is absent if it is unknown. ``live_floors``: the program's minimum live bytes on the device in
    the first half of its history and in the second; None if unknown.
    """

    verdicts: Sequence[Verdict] = ()
    peak_bytes_by_device: Mapping[str, int] = field(default_factory=dict)
    live_floors: tuple[float, float] | None = None

    @cached_property
    def limit_excess_bytes(self) -> int:
        """Bytes by which the request exceeds the allocator's limit, if this is the cause; else 0.

        An arena's free memory is used before more is needed: the limit lacks what exceeds the live bytes.
        Where only the peak is known, it's that of the live bytes, or the request if it exceeds the limit by more.
        """
        if not self.is_limited or self.limit is None:
            return 0
        request, limit = self.request_bytes or 0, self.limit[0]
        excess = self.reached_bytes + request - limit
        if not self.is_from_later_report:
            used = self.failed_pool.live_bytes if self.failed_pool is not None and self.is_arena else 0
            return used + request - limit if used + request > limit else excess
        live = max((each.peak_live_bytes or 0 for each in self.peak_pools), default=0)
        return max(min(excess, request), live + request - limit)

    @property
    def was_repeated(self) -> bool:
        """Return whether `retry_on_oom` made another attempt after this error, as after all before: it counts them."""
        newest = max((each.number for each in self.report.program.ooms), default=self.oom.number)
        return self.oom.seen == "retry" and self.report.program.oom_retries >= newest

    @property
    def is_arena(self) -> bool:
        return self.failed_pool is not None and self.failed_pool.allocator in ARENA_ALLOCATORS

    @property
    def used_of_limit_bytes(self) -> int:
        """Bytes that counted against the allocator's limit before the request, if this is the cause; else 0."""
        return 0 if self.limit is None else max(0, self.limit_excess_bytes + self.limit[0] - (self.request_bytes or 0))

    @cached_property
    def context(self) -> AdviceContext | None:
        """The context of advice on the program, None if the device is unknown."""
        if self.uuid is None:
            return None
        return replace(context_of(self.report, self.uuid, self.snapshot), oom=self.oom, reports=self.snapshot.reports)

    @cached_property
    def missing_bytes(self) -> int | None:
        """Bytes by which the request was short; None if unknown."""
        if self.is_limited:
            return None if self.request_bytes is None else self.limit_excess_bytes
        if self.cgroup is not None:
            return self.cgroup_need_bytes - (self.cgroup.limit_bytes or 0)
        if self.request_bytes is None or self.free_bytes is None:
            return None
        return max(0, -(-self.request_bytes // SEGMENT_BYTES) * SEGMENT_BYTES - self.free_bytes)

    @property
    def cgroup_need_bytes(self) -> int:
        """Bytes that the cgroup would have used with the request."""
        return (
            (self.cgroup.used_bytes or 0) + self.grown_bytes + (self.request_bytes or 0)
            if self.cgroup is not None
            else 0
        )

    @cached_property
    def grant(self) -> GrantedRequest | None:
        """The program's request for memory of the device that was granted, and not all held before the error."""
        grants = (each for each in self.frame_before.grants if each.device_uuid == self.uuid and self._is_own(each))
        return next(grants, None)

    def available_bytes(self, device: DeviceReading) -> int | None:
        """Return the minimum free bytes of another device in the last minute, without those that another program is
        granted; None if unknown, or if a program there is leaking.
        """
        free, used = device.current_free_bytes, device.used_bytes
        is_leaking = any(each.kind == "leak" and each.device_uuid == device.uuid for each in self.verdicts)
        if free is None or used is None or is_leaking:
            return None
        returned = max(0, self.peak_bytes_by_device.get(device.uuid, used) - used)
        others = (
            each for each in self.frame_before.grants if each.device_uuid == device.uuid and not self._is_own(each)
        )
        return max(0, free - returned - sum(each.unused_bytes for each in others))

    def _is_own(self, grant: GrantedRequest) -> bool:
        return grant.pid == self.report.pid or grant.id == self.report.admission

    @cached_property
    def neighbors(self) -> list[NeighborUsage]:
        """The other programs with an agent on the device, the largest part that can be reclaimed first."""
        device = self.device
        neighbors = []
        for report in self.snapshot.reports_by_device.get(device.uuid, ()) if device else ():
            if report.key != self.report.key and device is not None:
                is_flushable = report.flush_policy != "never" and not report.suspended
                reclaimable = self.snapshot.reclaimable_from(report, device) if is_flushable else 0
                neighbors.append(NeighborUsage(report, self.snapshot.used_by(report.key, device) or 0, reclaimable))
        return sorted(neighbors, key=lambda each: -each.reclaimable_bytes)

    @cached_property
    def held_by_others_bytes(self) -> int:
        """Bytes of the device that other programs and unknown owners hold."""
        return sum(line.used_bytes for line in self.lines if line.process != self.report.key)

    @cached_property
    def overhead_bytes(self) -> int:
        """The program's bytes outside its pools before the error, which include what its pools gained since its last
        report: at most what the device has besides the pools and the others.
        """
        before = sum(line.used_bytes for line in self.own_lines if line.share == "overhead")
        if self.in_use_bytes is None:
            return before
        return max(0, min(before, self.in_use_bytes - self.held_bytes - self.held_by_others_bytes))

    @cached_property
    def in_use_bytes(self) -> int | None:
        """Bytes of the device that were neither free nor reserved at the error; None if unknown."""
        if self.device is None or self.device.usable_bytes is None or self.free_bytes is None:
            return None
        return self.device.usable_bytes - self.free_bytes

    @cached_property
    def ledger_difference_bytes(self) -> int:
        """Bytes in use at the error, less those that the ledger before it and the program's record contain; 0 if
        unknown, or so few that the text of the error has rounded them.
        """
        if self.in_use_bytes is None or self.device is None:
            return 0
        known = self.held_bytes + self.overhead_bytes if self.pools else sum(line.used_bytes for line in self.own_lines)
        difference = self.in_use_bytes - self.held_by_others_bytes - known
        return difference if abs(difference) > ROUNDING_RATIO * (self.device.size_bytes or 0) else 0

    @property
    def unaccounted_bytes(self) -> int:
        """Bytes in use at the error that neither the ledger before it nor the program's record contains."""
        return max(0, self.ledger_difference_bytes)

    @property
    def overcount_bytes(self) -> int:
        """Bytes that the ledger before the error contains, and that were free at the error."""
        return max(0, -self.ledger_difference_bytes)

    @cached_property
    def freed_since_bytes(self) -> int:
        """The unaccounted bytes that the program probably held, and freed before its record: it once held as
        many, and the record is of a later report.
        """
        size = self.device.size_bytes if self.device and self.device.size_bytes else 0
        has_held = (
            self.is_from_later_report
            and self.reached_bytes - self.held_bytes >= self.unaccounted_bytes - SIZE_TOLERANCE_RATIO * size
        )
        return self.unaccounted_bytes if has_held else 0

    @cached_property
    def lines(self) -> list[LedgerLine]:
        """The ledger of the device."""
        return [line for line in self.frame_before.ledger.lines if line.device_uuid == self.uuid]

    @property
    def own_lines(self) -> Iterator[LedgerLine]:
        return (line for line in self.lines if line.process == self.report.key)

    @cached_property
    def classes(self) -> LiveClasses | None:
        known = [each for each in self.oom.classes if self.uuid in (None, each.device_uuid)]
        return max(known, key=lambda each: each.live_bytes, default=None)

    @cached_property
    def activations_bytes(self) -> int:
        """Bytes of activations, with those of other tensors where these are not distinguished."""
        classes = self.classes
        if classes is None or classes.buffers_bytes is None:
            return 0
        return classes.unknown_bytes if classes.activations_bytes is None else classes.activations_bytes

    @cached_property
    def batch_dependent_bytes(self) -> int:
        """Activations; for inference also the results of a model, which are tensors outside the graph, as is the KV
        cache of a serving engine, whose size is fixed.
        """
        results = 0 if self.classes is None or not self.is_inference else self.classes.tensors_bytes or 0
        fixed_bytes = sum(engine.kv_cache_bytes or 0 for engine in self.own_engines())
        return self.activations_bytes + max(0, results - fixed_bytes)

    @property
    def is_inference(self) -> bool:
        """Return whether a model runs without a graph; in a first forward pass of training, there are activations."""
        classes = self.classes
        if classes is None or self.is_training or not classes.parameters_bytes or classes.activations_bytes is None:
            return False
        return classes.activations_bytes < classes.live_bytes / 20  # the allocator's rounding and workspaces

    @property
    def is_training(self) -> bool:
        return self.classes is not None and bool(self.classes.gradients_bytes or self.classes.optimizer_bytes)

    def engines(self) -> Iterator[tuple[EngineReading, int]]:
        """Yield the serving engines on the device, each with its bytes there."""
        for engine in self.snapshot.engines:
            for device, used in self.snapshot.used_by_engine(engine):
                if device.uuid == self.uuid:
                    yield engine, used

    def own_engines(self) -> Iterator[EngineReading]:
        """Yield the serving engines that the program is a process of."""
        for engine, _ in self.engines():
            if self.report.key in [process.key for process in engine.processes]:
                yield engine

    def is_enough(self, size: int | None) -> bool | None:
        """Return whether these bytes are at least the missing ones."""
        return None if size is None or self.missing_bytes is None else size >= self.missing_bytes


SEGMENT_BYTES = 2 << 20
"""Granularity in which allocators take memory from a device."""
IDLE_SECONDS = 60.0
"""Time without work from which a serving engine or a program may release its memory for another."""
NOTABLE_RATIO = 0.1
"""Part of the live bytes from which growth is named."""
LASTING_RATIO = 0.45
"""Part of the growth that is in the floor of the second half: half of it in a line, less some readings."""
LARGE_RATIO = 0.5
"""Part of the live bytes from which one class is the cause."""
FRAGMENTED_RATIO = 0.01
"""Part of the held bytes from which free blocks are the cause: less serves one request, and the next one fails."""
MIN_LEAK_STEPS, MIN_PEAK_STEPS = 10, 3
"""Minimum numbers of steps from which the growth of a step, or its peak, is known."""
CHECKPOINTED_RATIO = 0.75
"""Part of the activations that checkpointing saves: of 16 equal layers, the inputs of 4 segments remain."""
BATCH_DIVISORS = (2, 4, 8)
ORPHAN_RATIO = 0.05
"""Part of the device from which memory without an owner is named."""
OWN_LIMITS = {
    "torch": "torch.cuda.set_per_process_memory_fraction",
    "cupy": "MemoryPool.set_limit, or CUPY_GPU_MEMORY_LIMIT",
    "rmm": "the pool's maximum_pool_size",
    "jax": "XLA_CLIENT_MEM_FRACTION, formerly XLA_PYTHON_CLIENT_MEM_FRACTION",
}
"""Where a program limits an allocator with the library's own function or setting."""
DEFAULT_LIMIT_RATIOS = {"jax": 0.75}
"""Part of a device to which an allocator limits itself without a setting."""
SIZE_TOLERANCE_RATIO = 0.02
"""Part of a device by which its size differs between the driver and a library."""
ROUNDING_RATIO = 0.001
"""Part of a device up to which the free bytes in the text of an error are rounded."""
MIN_RAISE_RATIO, LIMIT_ROUNDING_BYTES = 0.05, GIB / 10
"""Minimum part of a limit by which it is raised, and the multiple to which the new limit is rounded up, as texts show
it.
"""
ARENA_ALLOCATORS = ("jax", "rmm", "tensorflow")
"""Allocators that keep all memory and serve requests from it."""
RETRYING_ALLOCATORS = ("torch", "cupy", "sim")
"""Allocators that release their cache and try again before they fail."""
CUPY_WITHOUT_RETRY = re.compile(r"\bcupy (?:[1-9]|1[0-3])\.")
"""Versions of CuPy that fail at their own limit without a second attempt."""
OPTIMIZER_PATH = "/torch/optim/"
PREALLOCATION_ADVICE = ("tensorflow-memory-growth", "jax-preallocation", "rmm-pool-size")


def remedies(evidence: Evidence) -> tuple[Remedy, ...]:
    """Return all remedies, those that alone would have been enough first; the last resort is ``nothing``."""
    finders = [
        finder for finder in REMEDIES if not ((evidence.is_limited or evidence.cgroup) and finder in DEVICE_REMEDIES)
    ]
    candidates = [each for finder in finders for each in finder(evidence)] or [*_smaller_request(evidence)]
    candidates.sort(key=effect_order)  # stable: the order of REMEDIES within
    if any(each.enough or each.enough is None for each in candidates) or evidence.missing_bytes is None:
        return tuple(candidates)
    return (*_combination(evidence, candidates), *candidates)


def _remedy(evidence: Evidence, name: str, text: str, size: int | None, basis: Basis, source: str) -> Remedy:
    return Remedy(name=name, text=text, size_bytes=size, enough=evidence.is_enough(size), basis=basis, source=source)


def _repeat(evidence: Evidence) -> Iterator[Remedy]:
    if evidence.missing_bytes == 0 and not evidence.is_limited:
        text = "repeat the call (gpumond.agent.retry_on_oom): the GPU has room for the request"
        yield _remedy(evidence, "repeat", text, evidence.free_bytes, "measured", "the driver's free bytes")


def _limit(evidence: Evidence) -> Iterator[Remedy]:
    if evidence.is_limited and evidence.limit is not None:
        limit_bytes, quota = evidence.limit
        subject, where = f"the limit of the {quota} quota", "in the configuration or through the API"
        if not quota:
            subject, where = "the program's limit", f"gpumond limit --pid {evidence.report.pid} SIZE"
        if quota is None:
            subject = _own_limit_text(evidence, limit_bytes)
            where = OWN_LIMITS.get(evidence.oom.allocator, "it's set in the program")
        enough_bytes = _rounded_limit_bytes(
            limit_bytes + max(evidence.limit_excess_bytes, int(MIN_RAISE_RATIO * limit_bytes))
        )
        at_most = "at most " if evidence.is_from_later_report else ""
        why = f"; {at_most}{size_text(evidence.missing_bytes)} was missing" if evidence.missing_bytes else ""
        text = f"raise {subject} from {size_text(limit_bytes)} to {size_text(enough_bytes)} or more ({where}{why})"
        basis: Basis = "estimate" if evidence.is_from_later_report else "measured"
        source = "the program's peak" if evidence.is_from_later_report else "the bytes held at the error"
        yield _remedy(evidence, "limit", text, enough_bytes - limit_bytes, basis, f"the limit in force, and {source}")


def _rounded_limit_bytes(limit_bytes: int) -> int:
    """Return a limit, rounded up."""
    return int(math.ceil(limit_bytes / LIMIT_ROUNDING_BYTES) * LIMIT_ROUNDING_BYTES)


def _cgroup(evidence: Evidence) -> Iterator[Remedy]:
    if evidence.cgroup is not None and not evidence.is_limited:
        limit_bytes = evidence.cgroup.limit_bytes or 0
        enough_bytes = _rounded_limit_bytes(evidence.cgroup_need_bytes)
        used = size_text(evidence.cgroup_need_bytes - (evidence.request_bytes or 0))
        text = (
            f"raise the limit of the cgroup {evidence.cgroup.cgroup}, which used {used}, from "
            f"{size_text(limit_bytes)} to {size_text(enough_bytes)} or more"
        )
        yield _remedy(evidence, "limit", text, enough_bytes - limit_bytes, "measured", "driver, for the cgroup")


def _own_limit_text(evidence: Evidence, limit_bytes: int) -> str:
    ratio = DEFAULT_LIMIT_RATIOS.get(evidence.oom.allocator)
    device_bytes = evidence.device.size_bytes if evidence.device else None
    if ratio is None or device_bytes is None or abs(limit_bytes / device_bytes - ratio) > SIZE_TOLERANCE_RATIO:
        return "the program's limit"
    return f"{evidence.oom.allocator.upper()}'s default limit, {ratio:.0%} of the GPU,"


def _ranks(evidence: Evidence) -> Iterator[Remedy]:
    failed = evidence.report
    for other in evidence.neighbors if failed.program.distributed or failed.rank is not None else ():
        report = other.report
        is_same_job = (report.uid, report.job, report.workload) == (failed.uid, failed.job, failed.workload)
        if is_same_job and (report.program.distributed or report.rank is not None) and report.rank != failed.rank:
            text = (
                f"put each rank on its own GPU (torch.cuda.set_device(LOCAL_RANK)): ranks {failed.rank} and "
                f"{report.rank} share this one"
            )
            yield _remedy(evidence, "ranks", text, other.held_bytes, "measured", "driver, for the other rank")
            return


def _free_pool_bytes(evidence: Evidence) -> int:
    """Return the free bytes of the pool that failed, if the request would fit into them as a whole."""
    pool = evidence.failed_pool
    free = 0 if pool is None else pool.cached_bytes + pool.stranded_bytes
    room = (
        max(0, evidence.limit[0] - evidence.reached_bytes)
        if evidence.is_limited and evidence.limit is not None
        else evidence.free_bytes or 0
    )
    return free if evidence.request_bytes is not None and 0 < evidence.request_bytes <= free + room and free else 0


def _fragmentation(evidence: Evidence) -> Iterator[Remedy]:
    pool, free_bytes = evidence.failed_pool, _free_pool_bytes(evidence)
    if pool is None or evidence.request_bytes is None or not free_bytes:
        return
    if pool.largest_free_bytes is not None and pool.largest_free_bytes >= evidence.request_bytes:
        text = (
            f"update PyTorch: a free block of {size_text(pool.largest_free_bytes)} fits but wasn't used "
            "(pytorch#189504, fixed by #191302); until then, call torch.cuda.empty_cache() first"
        )
        yield _remedy(evidence, "free-block", text, pool.largest_free_bytes, "measured", "the largest free block")
        return
    change = "" if evidence.context is None else whole_block_change(pool.allocator, evidence.context)
    if pool.stranded_bytes >= max(free_bytes // 2, FRAGMENTED_RATIO * evidence.held_bytes) and change:
        largest = (
            "" if pool.largest_free_bytes is None else f", at most {size_text(pool.largest_free_bytes)} in one block"
        )
        text = f"{change} ({size_text(free_bytes)} is free in the program's pool{largest})"
        yield _remedy(evidence, "fragmentation", text, free_bytes, "measured", "free bytes of the pool at the error")


def _own_caches(evidence: Evidence) -> Iterator[Remedy]:
    """Memory that allocators of the program cache: the one that failed has in general returned its own before."""
    failed_allocator = evidence.oom.allocator or (evidence.failed_pool.allocator if evidence.failed_pool else "")
    keeps_cache = (
        failed_allocator == "cupy"
        and evidence.is_limited
        and not evidence.is_from_later_report
        and CUPY_WITHOUT_RETRY.search(" ".join(evidence.report.frameworks))
    )
    pools = (
        [pool for pool in evidence.pools if pool.cached_bytes and (keeps_cache or pool.allocator != failed_allocator)]
        if failed_allocator
        else []
    )
    if evidence.is_limited:
        pools = [pool for pool in pools if pool.allocator == failed_allocator]
    size = sum(pool.cached_bytes for pool in pools)
    if size:
        names = ", ".join(dict.fromkeys(pool.allocator for pool in pools))
        text = f"flush the program's own {names} cache before the call: gpumond.agent.flush()"
        basis: Basis = "estimate" if keeps_cache else "measured"
        yield _remedy(evidence, "own-cache", text, size, basis, "free bytes of these pools at the error")


def _cached_note(evidence: Evidence) -> str:
    """Return why the pool's cached bytes were of no use although they cover the request; else an empty text."""
    pool = evidence.failed_pool
    if (
        pool is None
        or evidence.is_from_later_report
        or pool.allocator not in RETRYING_ALLOCATORS
        or pool.cached_bytes < (evidence.missing_bytes or 1)
    ):
        return ""
    if any(each.name == "own-cache" for each in _own_caches(evidence)) and evidence.is_limited:
        return ""
    return (
        f" {pool.allocator} had released its cache before it failed: the {size_text(pool.cached_bytes)} still cached "
        "can't be released, or has been freed since."
    )


def _leak(evidence: Evidence) -> Iterator[Remedy]:
    step = evidence.report.program.step or (evidence.earlier_report.program.step if evidence.earlier_report else None)
    verdict = next(
        (each for each in evidence.verdicts if each.kind == "leak" and each.process == evidence.report.key), None
    )
    if verdict is not None:
        seconds = max(0.0, evidence.oom.at - verdict.since)
        grown = int(verdict.fit.slope_bytes_per_second * seconds) if verdict.fit else 0
        text = "stop the leak"
        if step and step.retained_bytes and step.retained_bytes > 0:
            text += f": each step retains {size_text(step.retained_bytes)}"
    elif step and step.retained_bytes and step.steps >= MIN_LEAK_STEPS and evidence.live_floors:
        first_floor, second_floor = evidence.live_floors
        grown = int(step.retained_bytes * step.steps)
        is_lasting = (
            NOTABLE_RATIO * evidence.live_bytes
            <= grown
            <= min(evidence.live_bytes - first_floor, (second_floor - first_floor) / LASTING_RATIO)
        )
        if not is_lasting:
            return
        text = f"find what the program retains: its live memory grew by {size_text(grown)} in {step.steps} steps"
    else:
        return
    retaining = [scope for scope in evidence.oom.scopes if 0 < scope.retained_bytes <= evidence.live_bytes]
    if evidence.report.program.retainers:
        retainer = evidence.report.program.retainers[0]
        text += f"; {retainer.name} at {location_text(retainer)} retains tensors"
    elif retaining:
        text += f"; {retaining[0].name} retains {size_text(retaining[0].retained_bytes)}"
    yield _remedy(evidence, "leak", text, min(grown, evidence.live_bytes) or None, "measured", "growth of live memory")


def _neighbors(evidence: Evidence) -> Iterator[Remedy]:
    chosen: list[NeighborUsage] = []
    size = 0
    for other in evidence.neighbors:
        if other.reclaimable_bytes and (evidence.missing_bytes is None or size < evidence.missing_bytes or not chosen):
            chosen.append(other)
            size += other.reclaimable_bytes
    if chosen:
        names = ", ".join(_program_name(each.report) for each in chosen[:3]) + (
            "" if len(chosen) <= 3 else " and others"
        )
        which = f"--pid {chosen[0].report.pid}"
        if len(chosen) > 1 and evidence.device is not None:
            which = f"--device {evidence.device.index}"
        text = (
            f"flush {names} with gpumond flush {which}; gpumond.agent.retry_on_oom(borrow=True) does this automatically"
        )
        yield _remedy(evidence, "neighbor-cache", text, size, "reported", "agents of these programs")


def _suspensions(evidence: Evidence) -> Iterator[Remedy]:
    for other in sorted(evidence.neighbors, key=lambda each: -each.held_bytes):
        report = other.report
        usage = evidence.device.processes_by_key.get(report.key) if evidence.device else None
        if usage is None or usage.idle_seconds is None or usage.idle_seconds < IDLE_SECONDS:
            continue
        if report.can_suspend and 2 * other.reclaimable_bytes < other.held_bytes:
            idle = duration_text(usage.idle_seconds)
            text = f"suspend {_program_name(report)}, idle for {idle} (gpumond suspend --pid {report.pid})"
            yield _remedy(evidence, "suspension", text, other.held_bytes, "measured", "driver's count for the program")


def _preallocation(evidence: Evidence) -> Iterator[Remedy]:
    for advice in ADVICE:
        if advice.name in PREALLOCATION_ADVICE and evidence.context is not None and advice.applies(evidence.context):
            pools = (
                pool for other in evidence.neighbors for pool in other.report.pools if pool.device_uuid == evidence.uuid
            )
            size = sum(_unused_bytes(pool) for pool in pools if advice.name.startswith(pool.allocator))
            yield _remedy(
                evidence,
                "preallocation",
                advice.text(evidence.context),
                size or None,
                "reported",
                "agents of these programs",
            )


def _unused_bytes(pool: PoolUsage) -> int:
    return max(0, pool.held_bytes - (pool.live_bytes or pool.held_bytes))


def _engines(evidence: Evidence) -> Iterator[Remedy]:
    own_names = [engine.name for engine in evidence.own_engines()]
    for engine, used in evidence.engines():
        is_idle = engine.idle_seconds is not None and engine.idle_seconds >= IDLE_SECONDS
        if engine.name not in own_names and engine.methods and not engine.sleeping and is_idle:
            text = (
                f"release the idle serving engine {engine.name}: gpumond flush --workload {engine.name} --step engine"
            )
            yield _remedy(evidence, "idle-engine", text, used, "estimate", "driver, for its processes")


def _spill(evidence: Evidence) -> Iterator[Remedy]:
    size = sum(pool.spillable_bytes or 0 for pool in evidence.earlier_pools)
    if size:
        text = f"move spillable data to the host: gpumond flush --pid {evidence.report.pid} --step spill --step cache"
        yield _remedy(evidence, "spill", text, size, "reported", "the library's spill manager")


def _orphans(evidence: Evidence) -> Iterator[Remedy]:
    unattributed = sum(line.used_bytes for line in evidence.lines if line.share == "unattributed")
    size = None if evidence.device is None else evidence.device.size_bytes
    for process in (evidence.device.processes or ()) if evidence.device else ():
        if process.orphaned and process.key != evidence.report.key and process.used_bytes:
            text = f"stop pid {process.pid} if you don't need it: its parent has exited"
            yield _remedy(evidence, "orphaned-process", text, process.used_bytes, "measured", "driver, for the process")
    if size is not None and unattributed >= ORPHAN_RATIO * size:
        text = "find out what uses the memory that belongs to no listed process: gpumond status"
        yield _remedy(
            evidence, "unattributed", text, unattributed, "measured", "driver: used memory minus the processes' memory"
        )


def _ungranted_neighbor(evidence: Evidence) -> Iterator[Remedy]:
    """A grant keeps memory from programs that ask for theirs, and from no other."""
    if (
        evidence.grant is None
        or evidence.free_bytes is None
        or evidence.free_bytes >= evidence.grant.unused_bytes
        or not evidence.missing_bytes
    ):
        return
    granted = {(each.device_uuid, each.pid) for each in evidence.frame_before.grants}
    sizes = [
        (size, name)
        for name, pid, size in _other_owners(evidence)
        if pid is not None and (evidence.uuid, pid) not in granted
    ]
    size, name = max(sizes, default=(0, ""))
    if size >= evidence.missing_bytes:
        text = (
            f"also start {name} with gpumond run --need, or reduce its memory use: it uses {size_text(size)} without a "
            f"grant, and this program was granted {size_text(evidence.grant.need_bytes)}"
        )
        yield _remedy(evidence, "grant", text, size, "measured", "driver's count for the program, and its grant")


def _other_device(evidence: Evidence) -> Iterator[Remedy]:
    need_bytes = (
        None
        if evidence.request_bytes is None
        else evidence.held_bytes + evidence.overhead_bytes + evidence.request_bytes
    )
    if need_bytes is None or not evidence.missing_bytes or evidence.held_by_others_bytes < evidence.missing_bytes:
        return
    need_bytes = max(need_bytes, evidence.grant.need_bytes if evidence.grant else 0)
    candidates = [
        (available, each)
        for each in evidence.snapshot.devices
        if each.uuid != evidence.uuid
        and (available := evidence.available_bytes(each)) is not None
        and available >= need_bytes
    ]
    if candidates:
        available, device = max(candidates, key=lambda candidate: candidate[0])
        text = (
            f"run this program, which needs at least {size_text(need_bytes)}, on GPU {device.index}, which has "
            f"{size_text(available)} available"
        )
        source = "the driver's lowest free bytes in a minute, minus what other programs are granted"
        yield replace(_remedy(evidence, "other-device", text, available, "measured", source), enough=True)


def _dataset(evidence: Evidence) -> Iterator[Remedy]:
    size = (
        0
        if evidence.classes is None or evidence.is_inference or any(_leak(evidence))
        else evidence.classes.tensors_bytes or 0
    )
    if size and size >= LARGE_RATIO * evidence.live_bytes:
        text = (
            "keep the data set on the host and move each batch (DataLoader with pin_memory=True): "
            f"{size_text(size)} of the live bytes are tensors outside the graph"
        )
        yield _remedy(evidence, "data-set", text, size, "measured", "classes of live bytes at the error")


def _kv_cache(evidence: Evidence) -> Iterator[Remedy]:
    for engine in evidence.own_engines():
        if engine.kv_cache_bytes and engine.kv_cache_used_ratio is not None:
            size = int(engine.kv_cache_bytes * (1 - engine.kv_cache_used_ratio))
            option = " (--gpu-memory-utilization)" if engine.kind == "vllm" else ""
            text = f"give {engine.name} a smaller KV cache{option}: {size_text(size)} of it is unused"
            yield _remedy(evidence, "kv-cache", text, size, "reported", "the serving engine's metrics")


def _earlier_peak(evidence: Evidence) -> Iterator[Remedy]:
    """The part by which this step or scope needs more than any before that had room: no peak has a failed request."""
    if evidence.earlier_report is None or evidence.request_bytes is None:
        return
    scopes = [
        (each.peak_bytes, scope.entries - scope.ooms, scope.ooms, scope.name)
        for scope in evidence.earlier_report.program.scopes
        if scope.name == evidence.oom.scope
        for each in scope.devices
        if each.device_uuid == evidence.uuid and scope.entries > scope.ooms
    ]
    step = evidence.earlier_report.program.step
    peaks = [pool.peak_live_bytes for pool in evidence.earlier_pools if pool.peak_live_bytes is not None]
    if scopes:
        usual_bytes, runs, failures, name = scopes[0]
        who = f"this run of {name}"
        change = f"use a smaller batch in {name} (or torch.no_grad(), if it is an evaluation)"
    elif step is not None and step.steps >= MIN_PEAK_STEPS and peaks and not any(_leak(evidence)):
        usual_bytes, runs, failures, who = sum(peaks), step.steps, evidence.oom.number - 1, "this step"
        change = "limit the longest input of a step (sequence length, image size)"
        if evidence.oom.scope:
            scope = f"the scope {evidence.oom.scope}"
            change = f"use a smaller batch in {scope} (or torch.no_grad(), if it is an evaluation)"
    else:
        return
    extra_bytes = evidence.live_bytes + evidence.request_bytes - usual_bytes
    if extra_bytes > 0:
        before = "the previous one" if runs == 1 else f"any of the {runs} earlier ones"
        restriction = " that didn't run out of memory" if failures else ""
        text = f"{change}: {who} needed {size_text(extra_bytes)} more than {before}{restriction}"
        yield _remedy(evidence, "earlier-peak", text, extra_bytes, "measured", "the program's own earlier peak")


def _batch(evidence: Evidence) -> Iterator[Remedy]:
    request_bytes = 0 if _is_within_optimizer(evidence) else evidence.request_bytes or 0
    dependent_bytes = evidence.batch_dependent_bytes + request_bytes
    if evidence.batch_dependent_bytes < LARGE_RATIO / 2 * evidence.live_bytes or not evidence.batch_dependent_bytes:
        return
    divisors = (
        divisor
        for divisor in BATCH_DIVISORS
        if evidence.missing_bytes is None or dependent_bytes * (1 - 1 / divisor) >= evidence.missing_bytes
    )
    divisor = next(divisors, BATCH_DIVISORS[-1])
    name = {2: "half the batch", 4: "a quarter of the batch", 8: "an eighth of the batch"}[divisor]
    addition = ", with gradient accumulation" if evidence.is_training else ""
    is_exact = (
        evidence.classes is not None and evidence.classes.activations_bytes is not None and not evidence.is_inference
    )
    kind = "activations" if is_exact else f"{CLASS_NAMES['tensors']} and activations"
    what, source = f"{size_text(evidence.batch_dependent_bytes)} of {kind}", "live bytes"
    if request_bytes:
        what, source = f"{what}, and this request of {size_text(request_bytes)},", "live bytes and request"
    text = f"use {name}{addition}: {what} depend on it"
    size = int(dependent_bytes * (1 - 1 / divisor))
    yield _remedy(evidence, "batch", text, size, "estimate", f"{source} in proportion to the batch")


def _checkpointing(evidence: Evidence) -> Iterator[Remedy]:
    if evidence.is_training and evidence.activations_bytes >= LARGE_RATIO * evidence.live_bytes:
        size = int(evidence.activations_bytes * CHECKPOINTED_RATIO)
        text = "use gradient checkpointing (torch.utils.checkpoint) if the program doesn't already"
        yield _remedy(evidence, "checkpointing", text, size, "estimate", "activations of 16 equal layers")


def _optimizer(evidence: Evidence) -> Iterator[Remedy]:
    classes = evidence.classes
    is_within = _is_within_optimizer(evidence)
    size = (
        0
        if classes is None
        else max(classes.optimizer_bytes or 0, 2 * (classes.parameters_bytes or 0) if is_within else 0)
    )
    if size:
        text = "keep the optimizer's state on the host or in 8 bits (FSDP CPUOffload, DeepSpeed, bitsandbytes)"
        basis: Basis = "estimate" if is_within else "measured"
        yield _remedy(
            evidence, "optimizer", text, size, basis, "two values for each parameter" if is_within else "classes"
        )


def _smaller_request(evidence: Evidence) -> Iterator[Remedy]:
    """The last resort if nothing else is known, and part of the request has room."""
    if evidence.oom.scope and evidence.missing_bytes and evidence.free_bytes:
        less = f"about {size_text(evidence.missing_bytes)} less in the scope {evidence.oom.scope}"
        text = f"request {less} (a smaller batch, or torch.no_grad() in an evaluation)"
        yield _remedy(
            evidence, "smaller-request", text, evidence.missing_bytes, "measured", "the request and the free bytes"
        )


def _is_within_optimizer(evidence: Evidence) -> bool:
    return any(OPTIMIZER_PATH in call.file for call in evidence.oom.stack)


def _is_optimizer_cause(evidence: Evidence) -> bool:
    """Return True if the optimizer is the cause: its step failed, or its state is half of the live bytes."""
    return _is_within_optimizer(evidence) or (
        evidence.classes is not None and (evidence.classes.optimizer_bytes or 0) >= LARGE_RATIO * evidence.live_bytes
    )


def _combination(evidence: Evidence, candidates: Sequence[Remedy]) -> Iterator[Remedy]:
    """Yield the first remedies whose sum is enough, else ``nothing``, with the bytes that are still missing."""
    missing, total, names = evidence.missing_bytes or 0, 0, list[str]()
    for each in candidates:
        total += each.size_bytes or 0
        names.append(each.name)
        if total >= missing:
            text = f"only these remedies together are enough: {', '.join(names)}"
            yield Remedy(
                name="together", text=text, size_bytes=total, enough=True, basis="estimate", source="sum of these"
            )
            return
    size = None if evidence.device is None else evidence.device.size_bytes
    over = 0 if size is None else evidence.live_bytes + evidence.overhead_bytes + (evidence.request_bytes or 0) - size
    missing_bytes = max(over, missing - total)
    lacks = size_text(missing_bytes)
    source = "sum of these"
    if 0 < over == missing_bytes:
        source = "the program's bytes and the GPU's size"
        text = f"no remedy is enough: the program needs {size_text(over)} more than this GPU has"
    elif candidates:
        text = f"no remedy is enough: even with all of them, {lacks} is missing"
    else:
        text, source = f"no remedy is known: {lacks} is missing", "the request and the free bytes"
    yield Remedy(name="nothing", text=text, size_bytes=None, enough=False, basis="measured", source=source)


REMEDIES: tuple[Callable[[Evidence], Iterator[Remedy]], ...] = (
    _limit,
    _cgroup,
    _ranks,
    _fragmentation,
    _own_caches,
    _leak,
    _neighbors,
    _suspensions,
    _preallocation,
    _engines,
    _spill,
    _orphans,
    _ungranted_neighbor,
    _other_device,
    _kv_cache,
    _dataset,
    _earlier_peak,
    lambda evidence: _optimizer(evidence) if _is_optimizer_cause(evidence) else iter(()),
    _batch,
    _checkpointing,
    lambda evidence: iter(()) if _is_optimizer_cause(evidence) else _optimizer(evidence),
    _repeat,
)
DEVICE_REMEDIES = (
    _ranks,
    _neighbors,
    _suspensions,
    _preallocation,
    _engines,
    _orphans,
    _ungranted_neighbor,
    _other_device,
)
"""Remedies that make room on the device: a program that reached its own limit can't use it."""


THIS_PROGRAM, PROBABLY_THIS_PROGRAM, UNKNOWN_PROCESS = (
    "the program itself",
    "the program itself probably",
    "an unknown process",
)


def summary_sentence(evidence: Evidence, candidates: Sequence[Remedy]) -> str:
    """Return what was asked, by which line, what held the device, and what alone would have been enough."""
    request_bytes, free_bytes = evidence.request_bytes, evidence.free_bytes
    requested = "memory" if request_bytes is None else size_text(request_bytes)
    free_text = "" if free_bytes is None else size_text(free_bytes)
    if request_bytes is not None and free_bytes is not None:
        requested, free_text = distinct_size_texts(request_bytes, free_bytes)
    requested += program_line_clause(evidence.oom.stack) or (
        f" in the scope {evidence.oom.scope}" if evidence.oom.scope else ""
    )
    requested += "" if evidence.device is None else f" on GPU {evidence.device.index}"
    owners = enumerate(_owners(evidence)[:3])
    sizes = (
        f"{name} {size_text(size)}" if number else f"{name} used {size_text(size)}" for number, (name, size) in owners
    )
    holders = ", ".join(sizes)
    for unnamed in (THIS_PROGRAM, UNKNOWN_PROCESS):
        if holders.startswith(unnamed):
            holders = unnamed.capitalize() + holders[len(unnamed) :]
    best = candidates[0] if candidates else None
    if best is None:
        end = "No remedy is known"
    elif best.enough and best.name != "together":
        has_several = sum(bool(each.enough) for each in candidates) > 1
        changes, example = ("Any of several changes", ", for example") if has_several else ("One change", "")
        end = f"{changes} would have been enough{example}: {best.text}"
    else:
        end = best.text[:1].upper() + best.text[1:]
    notes = _cached_note(evidence)
    if evidence.was_repeated:
        notes += " The program tried again (retry_on_oom)."
    if evidence.is_limited and evidence.limit is not None:
        limit_clause = f"{_program_name(evidence.report)} reached its limit of {size_text(evidence.limit[0])}"
        return f"{limit_clause}: it {_limited_use_clause(evidence)}requested {requested}.{notes} {end}"
    holders = f" {holders}.{notes}" if holders else notes
    pool_clause = "the out-of-memory pool served a request: " if evidence.oom.seen == "oom_pool" else ""
    free_clause = f", which had {free_text} free" if free_text else ""
    return f"{pool_clause}{_program_name(evidence.report)} requested {requested}{free_clause}.{holders} {end}"


def _limited_use_clause(evidence: Evidence) -> str:
    """Return what the program had of its limit before the request, such as ``held 3.0 GiB and``; empty for nothing."""
    if not evidence.used_of_limit_bytes:
        return ""
    used = ("at most " if evidence.is_from_later_report else "") + size_text(evidence.used_of_limit_bytes)
    return f"had {used} in use and " if evidence.is_arena else f"held {used} and "


def _owners(evidence: Evidence) -> list[tuple[str, int]]:
    """Return the owners of the device's memory, the largest first."""
    totals = Counter[str]()
    for name, _, size in _other_owners(evidence):
        totals[name] += size
    if evidence.held_bytes or evidence.freed_since_bytes:
        totals[PROBABLY_THIS_PROGRAM if evidence.freed_since_bytes else THIS_PROGRAM] = (
            evidence.held_bytes + evidence.overhead_bytes + evidence.freed_since_bytes
        )
    totals[UNKNOWN_PROCESS] += evidence.unaccounted_bytes - evidence.freed_since_bytes
    return [(name, size) for name, size in totals.most_common() if size]


def _other_owners(evidence: Evidence) -> list[tuple[str, int | None, int]]:
    """Return name, pid and bytes of each other owner of the device's memory."""
    totals: dict[tuple[str, int | None], int] = {}
    listed = {} if evidence.device is None else evidence.device.processes_by_key
    for line in evidence.lines:
        if line.process != evidence.report.key and line.used_bytes:
            process = None if line.process is None else listed.get(line.process)
            name = line.workload or (process.comm if process else "") or ""
            subject = UNKNOWN_PROCESS if line.process is None else program_text(name, line.pid, "")
            totals[subject, line.pid] = totals.get((subject, line.pid), 0) + line.used_bytes
    return [(*subject, size) for subject, size in totals.items()]


def _program_name(report: AgentReport) -> str:
    return program_text(report.workload, report.pid, "")
