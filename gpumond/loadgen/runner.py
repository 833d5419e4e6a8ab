"""Execution of a plan in processes: in this one or, if its program dies, in a sequence of children.

A child is forked before any engine is open, since no framework survives a fork.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumond.errors import ConfigError, GpumondError
from gpumond.loadgen.engines import AllocationRefused, LoadEngine
from gpumond.loadgen.executor import Executed, Terms, carry_out, prepare, runs
from gpumond.loadgen.plan import Plan
from gpumond.loadgen.script import Ending, ScriptStep
from gpumond.protocol.messages import from_json, to_json

GRACE_SECONDS = 10.0
MESSAGE_BYTES = 1 << 16

ERRORS: Mapping[int, type[GpumondError]] = {3: ConfigError, 4: GpumondError}
"""Exit codes of a child that could not execute the plan; it has written the reason."""

AgentContext = Callable[[], AbstractContextManager[None]]
"""A context manager that runs the agent in the process that holds the memory."""


def run(plan: Plan, engine: Callable[[], LoadEngine], terms: Terms, agent: AgentContext) -> list[Executed]:
    """Return the outcome of each run of the plan's program. Raises the exceptions of `prepare`."""
    planned_runs = list(runs(plan))
    if len(planned_runs) == 1 and not any(step.action == "end" for step in planned_runs[0][1]):
        return [_alone(plan, engine(), terms, agent)]
    done: list[Executed] = []
    started = time.monotonic()
    for number, (start, steps) in enumerate(planned_runs):
        if not _sleep(start, started, terms):
            break
        after = planned_runs[number + 1][0] if number + 1 < len(planned_runs) else plan.duration_seconds
        done.append(_child(plan, steps, after, engine, terms, agent))
        if done[-1].outcome in ("stopped", "full"):
            return done
    _sleep(plan.duration_seconds, started, terms)
    for carried in done:
        if carried.outcome == "orphan":
            Path(carried.detail).unlink(missing_ok=True)
    return done


def _alone(plan: Plan, engine: LoadEngine, terms: Terms, agent: AgentContext) -> Executed:
    try:
        carried = prepare(plan, engine, terms)
        with agent():
            carry_out(plan.steps_of(0), plan.duration_seconds, engine, terms, carried)
            engine.close()
    finally:
        engine.close()
    return carried


def _sleep(until: float, started: float, terms: Terms) -> bool:
    """Wait for a time of the plan."""
    while (left := started + until / terms.speed - time.monotonic()) > 0:
        if not terms.pause(left):
            return False
    return True


def _child(
    plan: Plan,
    steps: Sequence[ScriptStep],
    after: float,
    engine: Callable[[], LoadEngine],
    terms: Terms,
    agent: AgentContext,
) -> Executed:
    sys.stdout.flush()
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        own = replace(terms, pause=lambda seconds: os.getppid() == parent and terms.pause(seconds))
        _live(plan, steps, after, engine, own, agent, writer)
    os.close(writer)
    status = _wait(pid, terms)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read(MESSAGE_BYTES)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    if code in ERRORS:
        raise ERRORS[code](message.decode())
    if not message:
        raise AllocationRefused(f"the program of the plan ended before its time (wait status {status})")
    return from_json(Executed, message)


def _live(
    plan: Plan,
    steps: Sequence[ScriptStep],
    after: float,
    make: Callable[[], LoadEngine],
    terms: Terms,
    agent: AgentContext,
    writer: int,
) -> None:
    """Execute one run in the child. Does not return."""
    status = 1
    try:
        engine = make()
        carried = prepare(plan, engine, terms)
        carried.elapsed_seconds = steps[0].at
        with agent():
            ending = carry_out(steps, after, engine, terms, carried)
            if ending in (None, "exit"):
                engine.close()
            else:
                _end_process(ending, engine, carried, writer)
        os.write(writer, to_json(carried))
        status = 0
    except GpumondError as error:
        os.write(writer, str(error).encode()[:MESSAGE_BYTES])
        status = next(code for code, kind in ERRORS.items() if isinstance(error, kind))
    except BaseException:  # no exception may reach the code of the parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end_process(ending: Ending | None, engine: LoadEngine, carried: Executed, writer: int) -> None:
    """End the process as if killed by the kernel or an operator."""
    carried.outcome = "crash"
    if ending != "crash":
        carried.outcome, carried.detail = "orphan", str(engine.abandon())
    os.write(writer, to_json(carried))
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(pid: int, terms: Terms) -> int:
    """Wait until the child has ended, and stop it on request."""
    kill_at = float("inf")
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if kill_at == float("inf"):
            if not terms.pause(0.1):
                os.kill(pid, signal.SIGTERM)
                kill_at = time.monotonic() + GRACE_SECONDS
        elif time.monotonic() < kill_at:
            time.sleep(0.01)
        else:
            os.kill(pid, signal.SIGKILL)


def account(made: Plan, done: list[Executed], engine: str, speed: float, started_at: float) -> dict[str, Any]:
    """Return the work done and the truth, in real time and real bytes."""
    last, ended_at = done[-1], time.time()
    sums = ("taken_bytes", "takes", "gives", "flushes", "released_bytes", "checked_bytes", "wrong_words")
    peaks = ("peak_live_bytes", "peak_held_bytes")
    return {
        "scenario": made.scenario,
        "seed": made.seed,
        "options": dict(made.options),
        "engine": engine,
        "device_uuid": last.device_uuid,
        "pid": os.getpid(),
        "started_at": started_at,
        "ended_at": ended_at,
        "speed": speed,
        "scale": last.scale,
        "outcome": last.outcome,
        "detail": last.detail,
        "lives": len(done),
        "truth": _truth(made, done, speed, started_at, ended_at),
        **{name: sum(getattr(one, name) for one in done) for name in sums},
        **{name: max(getattr(one, name) for one in done) for name in peaks},
    }


def _truth(made: Plan, done: list[Executed], speed: float, started_at: float, ended_at: float) -> dict[str, Any]:
    """Return the truth in Unix time. If the load ended before the injection, no verdict is expected."""
    truth = made.truth

    def when(at: float | None) -> float | None:
        return None if at is None else started_at + at / speed

    injected_at = when(truth.injected_at)
    injected = injected_at is not None and injected_at < ended_at
    slope = truth.slope_bytes_per_second
    died = any(one.outcome == "crash" for one in done)  # too few restarts for a loop
    return {
        "kind": truth.kind if injected else "crash" if died else "",
        "form": truth.form if injected else "",
        "injected_at": injected_at if injected else None,
        "ends_at": min(ended_at, when(truth.ends_at) or ended_at) if injected else None,
        "slope_bytes_per_second": slope * done[-1].scale * speed if injected and slope is not None else None,
        "oom_at": when(truth.oom_at) if injected else None,
    }
