"""Execution of a plan in processes: in this one or, if its program dies, in a sequence of children; and its report.

A child is forked before any backend is open, since no framework survives a fork. ``--report FILE`` keeps the results,
one JSON object per line, each compared with the last one of the same run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from gpumond import __version__
from gpumond.facts.errors import ConfigError, GpumondError
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.units import plural, size_text
from gpumond.features.loadgen.backends import AllocationRefused, LoadBackend
from gpumond.features.loadgen.plan import LoadPlan
from gpumond.features.loadgen.scenario_builder import CONTEXT_BYTES, PlanStep, ProgramEnding
from gpumond.host.files import unwritable_text

EXIT_GRACE_SECONDS = 10.0
MAX_MESSAGE_BYTES = 1 << 16

ERRORS_BY_EXIT_CODE: Mapping[int, type[GpumondError]] = {3: ConfigError, 4: GpumondError}
"""Exit codes of a child that could not execute the plan; it has written the reason."""

AgentContext = Callable[[], AbstractContextManager[None]]
"""A context manager that runs the agent in the process that holds the memory."""


def run_plan(
    plan: LoadPlan, backend: Callable[[], LoadBackend], limits: RunLimits, agent: AgentContext
) -> list[CompletedWork]:
    """Return the outcome of each run of the plan's program. Raises the exceptions of `prepare`."""
    planned_runs = list(runs(plan))
    if len(planned_runs) == 1 and not any(step.action == "end" for step in planned_runs[0][1]):
        return [_run_without_child(plan, backend(), limits, agent)]
    completed: list[CompletedWork] = []
    started = time.monotonic()
    for number, (start, steps) in enumerate(planned_runs):
        if not _sleep(start, started, limits):
            break
        end = planned_runs[number + 1][0] if number + 1 < len(planned_runs) else plan.duration_seconds
        completed.append(_run_in_child(plan, steps, end, backend, limits, agent))
        if completed[-1].outcome in ("stopped", "full"):
            return completed
    _sleep(plan.duration_seconds, started, limits)
    for work in completed:
        if work.outcome == "orphan":
            Path(work.detail).unlink(missing_ok=True)
    return completed


def _run_without_child(plan: LoadPlan, backend: LoadBackend, limits: RunLimits, agent: AgentContext) -> CompletedWork:
    try:
        work = prepare(plan, backend, limits)
        with agent():
            carry_out(plan.steps_of(0), plan.duration_seconds, backend, limits, work)
            backend.close()
    finally:
        backend.close()
    return work


def _sleep(until: float, started: float, limits: RunLimits) -> bool:
    """Wait for a time of the plan."""
    while (remaining := started + until / limits.speed - time.monotonic()) > 0:
        if not limits.pause(remaining):
            return False
    return True


def _run_in_child(
    plan: LoadPlan,
    steps: Sequence[PlanStep],
    end: float,
    backend: Callable[[], LoadBackend],
    limits: RunLimits,
    agent: AgentContext,
) -> CompletedWork:
    sys.stdout.flush()
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        child_limits = replace(limits, pause=lambda seconds: os.getppid() == parent and limits.pause(seconds))
        _run_steps_in_child(plan, steps, end, backend, child_limits, agent, writer)
    os.close(writer)
    status = _wait(pid, limits)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read(MAX_MESSAGE_BYTES)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    if code in ERRORS_BY_EXIT_CODE:
        raise ERRORS_BY_EXIT_CODE[code](message.decode())
    if not message:
        raise AllocationRefused(f"the load generator's program exited early (wait status {status})")
    return from_json(CompletedWork, message)


def _run_steps_in_child(
    plan: LoadPlan,
    steps: Sequence[PlanStep],
    end: float,
    open_backend: Callable[[], LoadBackend],
    limits: RunLimits,
    agent: AgentContext,
    writer: int,
) -> None:
    """Execute one run in the child. Does not return."""
    status = 1
    try:
        backend = open_backend()
        work = prepare(plan, backend, limits)
        work.elapsed_seconds = steps[0].at
        with agent():
            ending = carry_out(steps, end, backend, limits, work)
            if ending in (None, "exit"):
                backend.close()
            else:
                _end_process(ending, backend, work, writer)
        os.write(writer, to_json(work))
        status = 0
    except GpumondError as error:
        os.write(writer, str(error).encode()[:MAX_MESSAGE_BYTES])
        status = next(code for code, kind in ERRORS_BY_EXIT_CODE.items() if isinstance(error, kind))
    except BaseException:  # no exception may reach the code of the parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end_process(ending: ProgramEnding | None, backend: LoadBackend, work: CompletedWork, writer: int) -> None:
    """End the process as if killed by the kernel or an operator."""
    work.outcome = "crash"
    if ending != "crash":
        work.outcome, work.detail = "orphan", str(backend.abandon())
    os.write(writer, to_json(work))
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(pid: int, limits: RunLimits) -> int:
    """Wait until the child has ended, and stop it on request."""
    kill_at = float("inf")
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if kill_at == float("inf"):
            if not limits.pause(0.1):
                os.kill(pid, signal.SIGTERM)
                kill_at = time.monotonic() + EXIT_GRACE_SECONDS
        elif time.monotonic() < kill_at:
            time.sleep(0.01)
        else:
            os.kill(pid, signal.SIGKILL)


Outcome = Literal["done", "stopped", "full", "crash", "orphan"]

LATE_SECONDS = 1.0
"""Delay after the plan's end at which the remaining steps are skipped, in seconds."""

CHECK_SECONDS = 30.0
PROGRESS_SECONDS = 0.5


@dataclass(slots=True)
class CompletedWork:
    """Work done so far. Bytes are counted by the backend."""

    outcome: Outcome = "done"
    detail: str = ""
    scale: float = 1.0
    room_bytes: int = 0
    device_uuid: str | None = None
    elapsed_seconds: float = 0.0
    taken_bytes: int = 0
    takes: int = 0
    gives: int = 0
    peak_live_bytes: int = 0
    peak_held_bytes: int = 0
    flushes: int = 0
    released_bytes: int = 0
    checked_bytes: int = 0
    wrong_words: int = 0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits and hooks of an execution. The plan's device is scaled to the share ``fill`` of the real device and to at
    most ``max_bytes``; without either, to the whole device.

    ``pause(seconds)`` waits and returns False to stop. ``flush`` replaces the backend's own flush. ``verify``: blocks
    are written and read again.
    """

    pause: Callable[[float], bool]
    fill: float | None = None
    max_bytes: int | None = None
    speed: float = 1.0
    flush: Callable[[], int] | None = None
    verify: bool = False
    progress: Callable[[float, CompletedWork], None] | None = None


def runs(plan: LoadPlan) -> Iterator[tuple[float, tuple[PlanStep, ...]]]:
    """Return the runs of the plan's first program: start time and steps of each."""
    steps: list[PlanStep] = []
    for step in plan.steps:
        if step.program:
            continue
        if step.action == "start" and steps:
            yield steps[0].at, tuple(steps)
            steps = []
        steps.append(step)
    if steps:
        yield steps[0].at, tuple(steps)


def prepare(plan: LoadPlan, backend: LoadBackend, limits: RunLimits) -> CompletedWork:
    """Open the backend and set its limit. Raises AllocationRefused without enough memory; nothing is allocated then."""
    if plan.expected_verdict.kind == "orphan" and not backend.makes_orphans:
        raise AllocationRefused(
            "a driver frees the memory of a killed program, so a real GPU has no orphan memory; use --backend sim"
        )
    capacity = backend.open()
    if limits.fill is None and limits.max_bytes is None:
        limit_bytes, scale = capacity.free_bytes, capacity.size_bytes / plan.size_bytes
    else:
        limit_bytes = int(capacity.size_bytes * (1.0 if limits.fill is None else limits.fill))
        limit_bytes = limit_bytes if limits.max_bytes is None else min(limit_bytes, limits.max_bytes)
        scale = (limit_bytes - backend.scratch_bytes) / (plan.size_bytes - CONTEXT_BYTES)
    needed = int(plan.peak_bytes * scale) + backend.scratch_bytes
    if scale <= 0 or needed > capacity.free_bytes:
        raise AllocationRefused(
            f"{plan.scenario} needs {size_text(needed)}, and the GPU has {size_text(capacity.free_bytes)} of "
            f"{size_text(capacity.size_bytes)} free: request less with --fill 40% or --max 8GiB, or free memory on the "
            "GPU"
        )
    backend.set_limit(min(limit_bytes, capacity.free_bytes))
    return CompletedWork(
        scale=scale, room_bytes=int(scale * (plan.size_bytes - CONTEXT_BYTES)), device_uuid=capacity.device_uuid
    )


def carry_out(
    steps: Sequence[PlanStep], until: float, backend: LoadBackend, limits: RunLimits, work: CompletedWork
) -> ProgramEnding | None:
    """Execute the steps at their times and update ``work``. Returns how the program must end, if the plan states it.

    ``until`` is the end of the plan. The backend is left open.
    """
    run = _Run(backend, limits, work)
    must_crash = steps[-1].action == "end" and steps[-1].ending == "crash"
    try:
        for number, step in enumerate(steps):
            if not run.wait(step.at):
                return None
            if work.elapsed_seconds > until + LATE_SECONDS * limits.speed:
                work.detail = f"too fast for this device: skipped {len(steps) - number} of {plural(len(steps), 'step')}"
                break
            if step.action == "end":
                return step.ending
            try:
                run.execute_step(step)
            except MemoryError:
                if not must_crash:
                    raise
        if must_crash:
            return "crash"
        if run.wait(until):
            run.check()
    except MemoryError as error:
        work.outcome, work.detail = "full", str(error)
    finally:
        run.update_progress()
    return None


class _Run:
    def __init__(self, backend: LoadBackend, limits: RunLimits, work: CompletedWork) -> None:
        self._backend, self._limits, self._work = backend, limits, work
        self._started = time.monotonic() - work.elapsed_seconds / limits.speed
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0
        self._written: set[int] = set()
        self._check_at = self._progress_at = 0.0
        self._at = -1.0

    def wait(self, at: float) -> bool:
        """Wait until a time of the plan. Returns False and sets the outcome if stopped before."""
        if at == self._at:
            return True
        while True:
            self.update_progress()
            remaining = (at - self._work.elapsed_seconds) / self._limits.speed
            if not self._limits.pause(max(0.0, min(remaining, PROGRESS_SECONDS))):
                self._work.outcome = "stopped"
                return False
            if remaining <= PROGRESS_SECONDS:
                self._at = at
                return True

    def update_progress(self) -> None:
        """Update the progress, and periodically verify the blocks."""
        work, now = self._work, time.monotonic()
        work.elapsed_seconds = (now - self._started) * self._limits.speed
        work.peak_live_bytes = max(work.peak_live_bytes, self._backend.live_bytes())
        work.peak_held_bytes = max(work.peak_held_bytes, self._backend.held_bytes())
        if self._limits.progress is not None and now >= self._progress_at:
            self._progress_at = now + PROGRESS_SECONDS
            self._limits.progress(work.elapsed_seconds, work)
        if now >= self._check_at:
            self.check()
            self._check_at = time.monotonic() + CHECK_SECONDS

    def check(self) -> None:
        for block in self._written:
            self._work.wrong_words += self._backend.count_wrong_words(block)
            self._work.checked_bytes += self._sizes[block]

    def execute_step(self, step: PlanStep) -> None:
        work, backend = self._work, self._backend
        if step.action in ("take", "take-outside"):
            size = max(1, int(step.size_bytes * work.scale))
            if self._live_bytes + size > work.room_bytes:
                raise MemoryError(
                    f"{size_text(self._live_bytes)} is allocated, and the limit is {size_text(work.room_bytes)}"
                )
            backend.allocate(step.block, size, step.action == "take-outside")
            self._live_bytes += size
            self._sizes[step.block] = size
            work.takes += 1
            work.taken_bytes += size
            if self._limits.verify and backend.has_contents:
                backend.write(step.block)
                self._written.add(step.block)
        elif step.action == "give" and step.block in self._sizes:
            self._live_bytes -= self._sizes.pop(step.block)
            self._written.discard(step.block)
            backend.free(step.block)
            work.gives += 1
        elif step.action == "busy":
            backend.set_busy(step.ratio)
        elif step.action == "flush":
            work.flushes += 1
            work.released_bytes += (self._limits.flush or backend.flush)()


COMPARED_KEYS = ("scenario", "backend", "device_uuid", "seed", "options", "speed")
"""Keys that two comparable results have in common."""
INCOMPLETE_OUTCOMES = ("stopped", "error")
"""Outcomes of loads that were interrupted or did not start; no result is compared with them."""
MIN_PEAK_RATIO = 0.99
"""Share of the last peak below which a peak is a regression: the device offers less memory."""

Result = Mapping[str, Any]


class ResultsFile:
    """The file of results. It is read once, before the load. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"--report {unwritable_text(path, error)}") from None
        with open(self._descriptor, encoding="utf-8", errors="replace", closefd=False) as file:
            text = file.read()
        self._results = list(_results(text.splitlines()))
        self._separator = "" if not text or text.endswith("\n") else "\n"  # after an incomplete line

    def add(self, result: Result) -> dict[str, Any]:
        """Append a result and return its comparison: ``compared_with``, ``regressions``. Raises ConfigError."""
        before = next((one for one in reversed(self._results) if _are_alike(one, result)), None)
        compared = {
            "compared_with": None if before is None else before.get("started_at"),
            "regressions": regressions(result, before),
        }
        line = json.dumps({"version": __version__, **result, **compared})
        try:
            os.write(self._descriptor, f"{self._separator}{line}\n".encode())
            os.fsync(self._descriptor)
        except OSError as error:
            raise ConfigError(f"--report {self._path}: {error.strerror or error}") from None
        self._separator = ""
        return compared

    def close(self) -> None:
        os.close(self._descriptor)


def completed_result(
    plan: LoadPlan, completed: list[CompletedWork], backend: str, speed: float, started_at: float
) -> dict[str, Any]:
    """Return the work done and the truth, in real time and real bytes."""
    last, ended_at = completed[-1], time.time()
    sums = ("taken_bytes", "takes", "gives", "flushes", "released_bytes", "checked_bytes", "wrong_words")
    peaks = ("peak_live_bytes", "peak_held_bytes")
    return {
        **_plan_keys(plan, backend, started_at, ended_at),
        "device_uuid": last.device_uuid,
        "pid": os.getpid(),
        "speed": speed,
        "scale": last.scale,
        "outcome": last.outcome,
        "detail": last.detail,
        "lives": len(completed),
        "expected_verdict": _expected_verdict(plan, completed, speed, started_at, ended_at),
        **{name: sum(getattr(run, name) for run in completed) for name in sums},
        **{name: max(getattr(run, name) for run in completed) for name in peaks},
    }


def _expected_verdict(
    plan: LoadPlan, completed: list[CompletedWork], speed: float, started_at: float, ended_at: float
) -> dict[str, Any]:
    """Return the truth in Unix time. If the load ended before the injection, no verdict is expected."""
    expected_verdict = plan.expected_verdict

    def when(at: float | None) -> float | None:
        return None if at is None else started_at + at / speed

    injected_at = when(expected_verdict.injected_at)
    injected = injected_at is not None and injected_at < ended_at
    slope = expected_verdict.slope_bytes_per_second
    died = any(run.outcome == "crash" for run in completed)  # too few restarts for a loop
    return {
        "kind": expected_verdict.kind if injected else "crash" if died else "",
        "form": expected_verdict.form if injected else "",
        "injected_at": injected_at if injected else None,
        "ends_at": min(ended_at, when(expected_verdict.ends_at) or ended_at) if injected else None,
        "slope_bytes_per_second": slope * completed[-1].scale * speed if injected and slope is not None else None,
        "oom_at": when(expected_verdict.oom_at) if injected else None,
    }


def failed_result(plan: LoadPlan, backend: str, started_at: float, detail: str) -> dict[str, Any]:
    """Return the result of a load that could not run, for example because other programs use the device."""
    return {**_plan_keys(plan, backend, started_at, time.time()), "outcome": "error", "detail": detail}


def _plan_keys(plan: LoadPlan, backend: str, started_at: float, ended_at: float) -> dict[str, Any]:
    return {
        "scenario": plan.scenario,
        "seed": plan.seed,
        "options": dict(plan.options),
        "backend": backend,
        "started_at": started_at,
        "ended_at": ended_at,
    }


def regressions(now: Result, before: Result | None) -> list[str]:
    """Return the reasons for which a result is worse than it should be, or than the one before."""
    reasons = []
    if now.get("outcome") == "error":
        return [f"the load couldn't run: {now.get('detail')}"]
    if now["wrong_words"]:
        reasons.append(plural(now["wrong_words"], "incorrect word"))
    if now["outcome"] == "full":
        reasons.append(f"the load ended early: {now['detail']}")
    if before is None or now["outcome"] in INCOMPLETE_OUTCOMES:
        return reasons
    last_peak, peak = before.get("peak_live_bytes"), now["peak_live_bytes"]
    if isinstance(last_peak, int) and peak < MIN_PEAK_RATIO * last_peak:
        reasons.append(f"the peak of live memory fell from {size_text(last_peak)} to {size_text(peak)}")
    if before.get("checked_bytes") and not now["checked_bytes"]:
        reasons.append("no contents were verified")
    return reasons


def summary(result: Result) -> str:
    """Return the comparison as one line."""
    at = result["compared_with"]
    if not isinstance(at, int | float):
        start = "first result of this load on this device"
    else:
        day = datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        start = f"compared with the result of {day} UTC"
    return f"{start}: {'; '.join(result['regressions']) or 'no regression'}"


def _are_alike(result: Result, other: Result) -> bool:
    return result.get("outcome") not in INCOMPLETE_OUTCOMES and all(
        result.get(key) == other.get(key) for key in COMPARED_KEYS
    )


def _results(lines: Iterable[str]) -> Iterator[Result]:
    """Yield the results of a file. A line that is incomplete or no result is skipped."""
    for line in lines:
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(result, dict) and "outcome" in result:
            yield result
