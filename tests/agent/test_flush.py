"""Flush command of the daemon: execution, refusal, and the figures of the result."""

from __future__ import annotations

import signal

import pytest

from gpumond.agent.flushing import has_raced, release_outcome
from gpumond.facts.messages import AgentRequest, AgentResponse, CancelFlush, FlushCommand, FlushResult, Report
from gpumond.facts.pools import ExpectedRelease, PoolUsage, Reclaimable
from tests.helpers.agent_daemon import FAKES, FakeDaemon, environment, finished, host, run_in_program
from tests.helpers.torch_program import MIB, flush_command, program, send_flush


def test_flush_releases_the_predicted_bytes_and_reports_the_change(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command())
        (change,) = result.pools
        assert (result.id, result.outcome, result.reason) == ("f1", "freed", "")
        assert change.expected == ExpectedRelease(40 * MIB, 40 * MIB, 40 * MIB, "exact")
        assert (change.before.held_bytes, change.after.held_bytes) == (60 * MIB, 20 * MIB)
        assert [(step.step, step.released_bytes) for step in result.steps] == [("ipc", 0), ("cache", 40 * MIB)]
        assert not change.raced
        daemon.wait(lambda d: True if d.received(Report)[-1].pools[0].held_bytes == 20 * MIB else None)
        assert "empty_cache on 0" in finished(process)


def test_dry_run_only_predicts(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(dry_run=True))
        assert (result.outcome, result.pools[0].expected.likely) == ("planned", 40 * MIB)
        assert finished(process) == "['snapshot']\n"


def test_policy_never_refuses_every_flush(daemon: FakeDaemon) -> None:
    with host(program("never"), environment(daemon.path, FAKES)) as process:
        assert send_flush(daemon, flush_command()).outcome == "refused"
        assert finished(process) == "[]\n"


def test_policy_step_flushes_in_the_programs_own_step(daemon: FakeDaemon) -> None:
    with host(program("step"), environment(daemon.path, FAKES)) as process:
        daemon.wait_message(Report)
        run_in_program(process, "gpumond.agent.step()")
        daemon.wait_peer().send(flush_command())
        run_in_program(process, "while not gpumond.agent._thread.has_waiting_commands: pass")
        assert not daemon.received(FlushResult)
        run_in_program(process, "gpumond.agent.step()")
        assert daemon.wait_message(FlushResult).outcome == "freed"
        finished(process)


def test_policy_step_without_a_step_defers(daemon: FakeDaemon) -> None:
    with host(program("step"), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(timeout_seconds=0.2))
        assert (result.outcome, "nothing was done" in result.reason) == ("deferred", True)
        run_in_program(process, "gpumond.agent.step()")
        assert finished(process) == "[]\n"


OUTCOMES = {"f1": "deferred", "f2": "nothing"}


def test_cancelled_flush_is_not_carried_out_after_a_stop(daemon: FakeDaemon) -> None:
    """A stopped program reads the flush command and its cancellation together when it continues."""
    with host(program(), environment(daemon.path, FAKES)) as process:
        daemon.wait_message(Report)
        process.send_signal(signal.SIGSTOP)
        daemon.wait_peer().send(flush_command(), CancelFlush("f1"), FlushCommand("f2", "torch", ("ipc",)))
        process.send_signal(signal.SIGCONT)
        daemon.wait(lambda d: True if {r.id: r.outcome for r in d.received(FlushResult)} == OUTCOMES else None)
        assert "empty_cache" not in finished(process)


def test_cancelled_request_is_not_carried_out_after_a_stop(daemon: FakeDaemon) -> None:
    setup = "gpumond.agent.on_end_request(lambda: print('ended', flush=True))"
    with host(program(setup=setup), environment(daemon.path, FAKES)) as process:
        daemon.wait_message(Report)
        process.send_signal(signal.SIGSTOP)
        requests = AgentRequest("r1", "end"), CancelFlush("r1"), AgentRequest("r2", "snapshot")
        daemon.wait_peer().send(*requests)
        process.send_signal(signal.SIGCONT)
        assert daemon.wait_message(AgentResponse).id == "r2"
        assert "ended" not in finished(process)


def test_waiting_flush_can_be_cancelled(daemon: FakeDaemon) -> None:
    with host(program("step"), environment(daemon.path, FAKES)) as process:
        daemon.wait_message(Report)
        daemon.wait_peer().send(flush_command())
        run_in_program(process, "while not gpumond.agent._thread.has_waiting_commands: pass")
        daemon.wait_peer().send(CancelFlush("f1"))
        run_in_program(process, "while gpumond.agent._thread.has_waiting_commands: pass")
        run_in_program(process, "gpumond.agent.step()")
        assert daemon.wait_message(FlushResult).outcome == "deferred"
        assert finished(process) == "[]\n"


def test_expired_flush_is_not_carried_out(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        assert send_flush(daemon, flush_command(timeout_seconds=0.0)).outcome == "timeout"
        assert finished(process) == "[]\n"


@pytest.mark.parametrize(
    ("flush", "setup", "reason"),
    [
        (flush_command(("cache", "exec")), "", "no step is called 'exec'"),
        (flush_command(allocator="rmm"), "", "no allocator 'rmm'"),
        (flush_command(), "gpumond.agent.report(); g = torch.cuda.CUDAGraph(); g.capture_begin()", "captured"),
        (flush_command(), "torch.WORLD.initialized = False", "CUDA isn't initialized"),
    ],
)
def test_unsafe_flushes_are_refused_with_the_reason(
    daemon: FakeDaemon, flush: FlushCommand, setup: str, reason: str
) -> None:
    with host(program(setup=setup), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush)
        assert result.outcome == "refused"
        assert reason in result.reason
        assert "empty_cache" not in finished(process)


def test_hooks_run_first_and_their_errors_are_in_the_result(daemon: FakeDaemon) -> None:
    setup = """
@gpumond.agent.on_flush
def drop() -> int:
    for segment in torch.WORLD.segments:
        segment.blocks = [(segment.size, FREE)]
    return 12 << 20
"""
    with host(program(setup=setup), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(("cache", "hooks", "gc")))
        assert result.outcome == "freed"
        assert [step.step for step in result.steps] == ["gc", "hooks", "cache"]
        assert str(12 * MIB) in result.steps[1].detail
        assert result.pools[0].after.held_bytes == 0
        run_in_program(process, "gpumond.agent.on_flush(lambda: 1 / 0)")
        daemon.wait_peer().send(FlushCommand("f2", "torch", ("hooks", "cache")))
        failed = daemon.wait(lambda d: next((r for r in d.received(FlushResult) if r.id == "f2"), None))
        assert (failed.outcome, "ZeroDivisionError" in failed.reason) == ("failed", True)
        finished(process)


def test_steps_report_their_effect(daemon: FakeDaemon) -> None:
    setup = """
import gc; gc.disable()
class Kept:
    def __del__(self):
        torch.WORLD.segments[0].blocks = [(20 << 20, FREE)]
def garbage():
    one = Kept()
    one.itself = one
garbage()
"""
    with host(program(setup=setup), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(("gc", "ipc", "cache")))
        steps = {step.step: step for step in result.steps}
        assert list(steps) == ["gc", "ipc", "cache"]
        assert "young objects" in steps["gc"].detail
        assert f"{12 * MIB} bytes no longer live" in steps["gc"].detail
        assert [step.released_bytes for step in result.steps] == [0, 0, 60 * MIB]
        finished(process)


def test_step_that_became_unsafe_is_skipped_with_its_reason(daemon: FakeDaemon) -> None:
    """A capture begins during the flush: the steps before it count."""
    setup = """
graph = torch.cuda.CUDAGraph()
gpumond.agent.report()
gpumond.agent.on_flush(lambda: graph.capture_begin() and 0)
"""
    with host(program(setup=setup), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(("hooks", "ipc", "cache")))
        assert result.outcome == "nothing"
        assert [(step.step, step.detail.startswith("refused: ")) for step in result.steps] == [
            ("hooks", False),
            ("ipc", True),
            ("cache", True),
        ]
        assert "cache refused: a CUDA graph is being captured" in result.reason
        assert "empty_cache" not in finished(process)


def test_hooks_are_not_called_during_a_capture(daemon: FakeDaemon) -> None:
    """The capture begins in a finalizer during the flush."""
    setup = """
import gc; gc.disable()
gpumond.agent.report()
graph = torch.cuda.CUDAGraph()
class Begins:
    def __del__(self):
        graph.capture_begin()
def garbage():
    one = Begins()
    one.itself = one
garbage()
gpumond.agent.on_flush(lambda: torch.WORLD.calls.append("hook"))
"""
    with host(program(setup=setup), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(("gc", "hooks")))
        assert [step.detail.startswith("refused: ") for step in result.steps] == [False, True]
        assert "hook" not in finished(process)


def test_refilled_flush_is_counted_if_released_memory_is_taken_again_at_once(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        send_flush(daemon, flush_command())
        assert daemon.wait_message(Report).pools[0].refilled_flushes == 0
        run_in_program(
            process, "torch.WORLD.allocations = 9; torch.WORLD.segments.append(Segment([(20 << 20, ACTIVE)]))"
        )
        daemon.wait(lambda d: True if d.received(Report)[-1].pools[0].refilled_flushes == 1 else None)
        finished(process)


def test_steps_that_the_library_lacks_are_reported(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(("trim",)))
        assert (result.outcome, result.reason) == ("nothing", "torch has none of the steps trim")
        finished(process)


def test_program_can_flush_without_a_daemon() -> None:
    code = program().replace("gpumond.agent.start(", "dict(")
    code = code.replace("print(torch.WORLD.calls)", "print(gpumond.agent.flush(), gpumond.agent.report())")
    with host(code, environment("/nowhere", FAKES)) as process:
        out = finished(process)
    assert "outcome='freed'" in out
    assert f"released_bytes={40 * MIB}, driver_released_bytes=None" in out
    assert f"held_bytes={20 * MIB}, reclaimable" in out


@pytest.mark.parametrize(
    ("released", "outcome"),
    [(-5, "nothing"), (0, "nothing"), (1, "partial"), (9, "partial"), (10, "freed"), (99, "freed")],
)
def test_outcome_depends_on_the_released_bytes(released: int, outcome: str) -> None:
    assert release_outcome(released, 10) == outcome


@pytest.mark.parametrize(
    ("live", "device_allocations", "steps", "expected"),
    [
        (10, 3, ("cache",), False),
        (10, 4, ("cache",), True),
        (11, 3, ("cache",), True),
        (9, 3, ("cache",), True),
        (9, 3, ("gc", "cache"), False),
    ],
)
def test_race_is_a_change_that_no_step_causes(
    live: int, device_allocations: int, steps: tuple[str, ...], expected: bool
) -> None:
    def pool(live: int, device_allocations: int) -> PoolUsage:
        nothing = Reclaimable(0, 0, 0)
        return PoolUsage(
            allocator="torch",
            device_uuid="GPU-0",
            live_bytes=live,
            held_bytes=50,
            reclaimable=nothing,
            stranded_bytes=0,
            device_allocations=device_allocations,
        )

    assert has_raced(pool(10, 3), pool(live, device_allocations), steps) is expected


CACHE = """
def drop() -> int:
    for segment in torch.WORLD.segments:
        segment.blocks = [(segment.size, FREE)]
"""


@pytest.mark.parametrize(
    ("hook", "steps", "expected"),
    [
        ("gpumond.agent.on_flush(drop)", ("hooks",), ExpectedRelease(0, 0, 60 * MIB, "interval")),
        ("gpumond.agent.on_flush(drop)", ("hooks", "cache"), ExpectedRelease(40 * MIB, 40 * MIB, 60 * MIB, "interval")),
        (
            "gpumond.agent.on_flush(drop, estimate=12 << 20)",
            ("hooks",),
            ExpectedRelease(0, 12 * MIB, 12 * MIB, "interval"),
        ),
        (
            "gpumond.agent.on_flush(estimate=lambda: 12 << 20)(drop)",
            ("hooks", "cache"),
            ExpectedRelease(40 * MIB, 52 * MIB, 52 * MIB, "interval"),
        ),
        (
            "gpumond.agent.on_flush(drop, estimate=lambda: 1 / 0)",
            ("hooks",),
            ExpectedRelease(0, 0, 60 * MIB, "interval"),
        ),
        ("gpumond.agent.on_flush(drop)", ("cache",), ExpectedRelease(40 * MIB, 40 * MIB, 40 * MIB, "exact")),
        ("", ("hooks",), ExpectedRelease(0, 0, 0, "exact")),
        ("", ("gc",), ExpectedRelease(0, 0, 60 * MIB, "interval")),
        ("", ("gc", "cache"), ExpectedRelease(40 * MIB, 40 * MIB, 60 * MIB, "interval")),
    ],
)
def test_plan_covers_exactly_the_requested_steps(
    daemon: FakeDaemon, hook: str, steps: tuple[str, ...], expected: ExpectedRelease
) -> None:
    with host(program(setup=CACHE + hook), environment(daemon.path, FAKES)) as process:
        result = send_flush(daemon, flush_command(steps, dry_run=True))
        assert (result.outcome, result.pools[0].expected) == ("planned", expected)
        finished(process)
