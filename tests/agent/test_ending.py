"""Ending of a program: in the agent's bye, and in the verdicts of the daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.facts.messages import Goodbye, Report
from gpumond.facts.program import Ending
from tests.helpers.agent_daemon import SECONDS, FakeDaemon, environment, host, run_in_program
from tests.helpers.running import RunningDaemon, until
from tests.helpers.scoped_program import MIB, program
from tests.helpers.simulated import UUID

OOM = "allocator.malloc(2000 * MIB)"
WRAPPED = """
def wrapped():
    try:
        allocator.malloc(2000 * MIB)
    except OutOfMemory as error:
        raise ValueError("no batch fits") from error
"""


@pytest.mark.parametrize(
    ("lines", "status", "ending"),
    [
        ([], 0, "exit"),
        (["suppressed(lambda: allocator.malloc(2000 * MIB))"], 0, "exit"),
        (["sys.exit(3)"], 3, "exit"),
        (["raise KeyboardInterrupt"], -2, "exit"),
        (["1 / 0"], 1, "error"),
        (["raise MemoryError('of the host')"], 1, "error"),
        ([OOM], 1, "out-of-memory"),
        (["agent.retry_on_oom(allocator.malloc)(2000 * MIB)"], 1, "out-of-memory"),
        ([f"exec({WRAPPED!r})", "wrapped()"], 1, "out-of-memory"),
        (["sys.excepthook = lambda *error: None", OOM], 1, "out-of-memory"),
        (["sys.ps1 = '>>> '", OOM], 1, "exit"),
        (["agent.stop()"], 0, None),
    ],
)
def test_bye_states_how_the_program_ends(
    daemon: FakeDaemon, tmp_path: Path, lines: list[str], status: int, ending: Ending | None
) -> None:
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report, process.pid)
        process.communicate("".join(f"{line}\n" for line in lines), timeout=SECONDS)
        assert process.returncode == status
        assert daemon.wait_message(Goodbye, process.pid).ending == ending


FAILING = ["def step(): allocator.malloc(2000 * MIB)", "step()"]


@pytest.mark.parametrize(
    "lines",
    [
        FAILING,
        ["sys.excepthook = lambda *error: None", *FAILING],
        [f"exec({WRAPPED!r})", "step = wrapped", "step()"],
        [FAILING[0], "import threading, time", "threading.Thread(target=time.sleep, args=(2.5,)).start()", "step()"],
    ],
)
def test_record_of_an_unhandled_error_is_complete(daemon: FakeDaemon, tmp_path: Path, lines: list[str]) -> None:
    """Without a scope or a retry; in the last one, the program ends some reports after its error."""
    with host(program(tmp_path), environment(daemon.path)) as process:
        daemon.wait_message(Report, process.pid)
        process.communicate("".join(f"{line}\n" for line in lines), timeout=SECONDS)
        daemon.wait_message(Goodbye, process.pid)
    (oom,) = daemon.wait_message(Report, process.pid).program.ooms
    assert (oom.device_uuid, oom.request_bytes) == (UUID, 2000 * MIB)
    assert oom.seen in ("unhandled", "counter")
    assert {"wrapped", "step"} & {call.function for call in oom.stack}


def test_error_right_after_the_start_is_recorded(daemon: FakeDaemon, tmp_path: Path) -> None:
    with host(program(tmp_path), environment(daemon.path)) as process:
        process.communicate(f"{OOM}\n", timeout=SECONDS)
        assert daemon.wait_message(Goodbye, process.pid).ending == "out-of-memory"
    assert daemon.wait_message(Report, process.pid).program.ooms


def test_ending_of_a_multiprocessing_child_is_unknown(daemon: FakeDaemon, tmp_path: Path) -> None:
    """It handles the error of its target itself and exits with its own status."""
    (tmp_path / "work.py").write_text(
        "import sys\n"
        "def work():\n"
        "    import gpumond.agent\n"
        "    gpumond.agent.start()\n"
        "    open(0).readline()\n"
        "    raise ValueError\n"
    )
    code = "import multiprocessing, work; c = multiprocessing.get_context('spawn').Process(target=work.work); c.start()"
    with host(f"{code}; print(c.pid, flush=True); c.join()", environment(daemon.path, tmp_path)) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        daemon.wait_message(Report, child)
        process.communicate("\n", timeout=SECONDS)
        assert daemon.wait_message(Goodbye, child).ending is None


RETRIED = "print(agent.retry_on_oom(allocator.malloc, shrink=lambda size: (size // 2,))(1500 * MIB))"
HANDLED = "suppressed(lambda: allocator.malloc(2000 * MIB))"


@pytest.fixture
def sim_daemon(serve: Callable[..., RunningDaemon], tmp_path: Path) -> RunningDaemon:
    return serve("--source", "sim", "--interval", "0.2s", environ={"GPUMOND_SIM_DIR": os.fspath(tmp_path / "cards")})


def verdicts_on_the_end(daemon: RunningDaemon, directory: Path, lines: list[str]) -> dict[str, str]:
    """Verdicts on the end of a program that held 250 MiB, by kind. Later programs use the device of the first one."""
    code = program(directory / "cards")
    if (directory / "cards" / "card0").exists():
        code = code.replace("import MIB", "import SimDevice, MIB").replace(
            "create(f", "(lambda path, _: SimDevice(path))(f"
        )
    with host(code, environment(daemon.socket)) as process:
        run_in_program(process, "allocator.malloc(200 * MIB)")
        own = {"pid": str(process.pid)}
        until(lambda: (daemon.value("gpumond_pool_live_bytes", **own) or 0) >= 250 << 20)
        until(lambda: (daemon.value("gpumond_device_memory_used_bytes") or 0) >= 250 << 20)
        for line in lines[:-1]:
            before = daemon.value("gpumond_pool_ooms_total", **own) or 0
            process.stdin.write(line + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            until(lambda before=before: (daemon.value("gpumond_pool_ooms_total", **own) or 0) > before)
        process.communicate("".join(lines[-1:]), timeout=SECONDS)

        def verdicts() -> dict[str, str]:
            summaries = {each["kind"]: each["summary"] for each in daemon.get("verdicts") if each["pid"] == process.pid}
            return {kind: summary for kind, summary in summaries.items() if kind in ("crash", "memory-freed")}

        def ended() -> bool:
            events = json.loads(daemon.request("/api/v1/events", Accept="application/json")[1])
            return any(event["kind"] == "process-ended" and event["pid"] == process.pid for event in events)

        until(lambda: "crash" in verdicts() or ended())
        return verdicts()


def test_programs_that_retried_after_an_error_and_exit_with_0_are_no_crash_and_no_alert(
    sim_daemon: RunningDaemon, tmp_path: Path
) -> None:
    for _ in range(3):
        assert verdicts_on_the_end(sim_daemon, tmp_path, [RETRIED, ""]) == {}
    assert not [each for each in sim_daemon.get("verdicts") if each["kind"].startswith("crash")]
    alerts = [*sim_daemon.get("alerts"), *sim_daemon.get("alerts/history")]
    assert "out-of-memory" not in {alert["rule"] for alert in alerts}


def test_program_that_handles_the_error_and_exits_with_0_is_no_crash(sim_daemon: RunningDaemon, tmp_path: Path) -> None:
    assert verdicts_on_the_end(sim_daemon, tmp_path, [HANDLED, ""]) == {}


def test_program_that_ends_with_an_out_of_memory_error_is_a_crash(sim_daemon: RunningDaemon, tmp_path: Path) -> None:
    verdicts = verdicts_on_the_end(sim_daemon, tmp_path, [OOM])
    assert verdicts.keys() == {"crash"}
    assert "crashed on GPU 0 after an unhandled out-of-memory error" in verdicts["crash"]
