"""Fork, spawn and exec: no deadlock, no inherited descriptor, and each process reports for itself."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumond.facts.messages import Goodbye, Hello, Report
from tests.helpers.agent_daemon import FakeDaemon, environment, finished, host

START = "import os, sys, time, gpumond.agent; gpumond.agent.start(workload='forks')\n"


def test_forked_child_reports_under_its_own_pid_and_the_parent_continues(daemon: FakeDaemon) -> None:
    code = f"""{START}
sys.stdin.readline()
child = os.fork()
if child == 0:
    sys.stdin.read()
    sys.exit()
print(child, flush=True)
os.waitpid(child, 0)
"""
    with host(code, environment(daemon.path)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        daemon.wait_message(Report, process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        assert daemon.wait_message(Hello, child).workload == "forks"
        parents = len(daemon.received(Report, process.pid))
        daemon.wait(lambda d: d.received(Report, process.pid)[parents:] or None)
        finished(process)
        daemon.wait_message(Goodbye, child)
        daemon.wait_message(Goodbye, process.pid)
        assert [len(daemon.received(Hello, pid)) for pid in (process.pid, child)] == [1, 1]
        assert {peer.pid for peer in daemon.peers} == {process.pid, child}


@pytest.mark.parametrize("when", ["at once", "while the agent starts", "while it runs"])
def test_forks_at_any_time_do_not_hang(daemon: FakeDaemon, when: str) -> None:
    wait = {"at once": "", "while the agent starts": "time.sleep(0.21)", "while it runs": "time.sleep(0.6)"}[when]
    code = f"""{START}
{wait}
for _ in range(100):
    child = os.fork()
    if child == 0:
        import json, socket, ctypes, dataclasses, logging
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    with host(code, environment(daemon.path), "-W", "error") as process:
        assert finished(process) == "done\n"


def test_forks_from_a_thread_do_not_hang(daemon: FakeDaemon) -> None:
    code = f"""{START}
import threading
def forks():
    for _ in range(50):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
threads = [threading.Thread(target=forks) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("forked", flush=True)
sys.stdin.read()
"""
    with host(code, environment(daemon.path), "-W", "ignore") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        reports = len(daemon.received(Report, process.pid))
        daemon.wait(lambda d: d.received(Report, process.pid)[reports:] or None)
        finished(process)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_pool_works_with_each_start_method(daemon: FakeDaemon, method: str) -> None:
    code = f"""
import multiprocessing
import gpumond.agent
if __name__ == "__main__":
    gpumond.agent.start(workload="workers")
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        print(sum(pool.map(abs, range(-100, 0))))
"""
    with host(code, environment(daemon.path)) as process:
        assert finished(process) == "5050\n"


def test_child_programs_inherit_no_descriptor(daemon: FakeDaemon) -> None:
    code = f"""{START}
import subprocess
sys.stdin.readline()
show = [sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"]
subprocess.run(show, close_fds=False)
subprocess.run(show, close_fds=False, preexec_fn=lambda: None)
sys.stdout.flush()
os.execv(show[0], show)
"""
    with host(code, environment(daemon.path)) as process:
        assert process.stdin is not None
        daemon.wait_message(Report, process.pid)
        first, second, third = finished(process).splitlines()
        assert first == second == third == str(["0", "1", "2", "3"])  # 3 is the descriptor of the listing


def test_agent_causes_no_python_warning_about_a_fork_with_threads(daemon: FakeDaemon) -> None:
    """Python warns about it since 3.12."""
    code = f"""{START}
for seconds in (0, 0, 0.21, 0.4, 0, 0.01, 0.1):
    time.sleep(seconds)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
print("done", flush=True)
sys.stdin.read()
"""
    with host(code, environment(daemon.path), "-W", "error") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        reports = len(daemon.received(Report, process.pid))
        daemon.wait(lambda d: d.received(Report, process.pid)[reports:] or None)
        finished(process)


BUSY = """
import logging, threading
lock = threading.Lock()
ended = threading.Event()
def work():
    while not ended.is_set():
        with lock:
            logging.getLogger("work").debug("held")
            gpumond.agent.report()
            gpumond.agent.flush(dry_run=True)
gpumond.agent.flush()
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
"""
"""Threads that hold their own lock, that of logging and that of the agent at the time of the fork."""


def test_child_forked_while_locks_are_held_can_use_the_agent(daemon: FakeDaemon) -> None:
    code = f"""{START}
import gpumond.sim.allocator
{BUSY}
for number in range(200):
    child = os.fork()
    if child == 0:
        gpumond.agent.report()
        gpumond.agent.flush()
        gpumond.agent.start(workload="child")
        gpumond.agent.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
ended.set()
print("done")
"""
    with host(code, environment(daemon.path), "-W", "ignore") as process:
        assert finished(process) == "done\n"


def test_program_that_ends_under_load_ends_at_once_without_output(daemon: FakeDaemon) -> None:
    """The program has daemon threads, and the agent is in the middle of a report, a connection or a command."""
    code = f"""{START}
import gpumond.sim.allocator
{BUSY.replace("target=work", "target=work, daemon=True")}
time.sleep(SECONDS)
print("over")
sys.exit(5)
"""
    for seconds in ("0", "0.15", "0.2", "0.205", "0.25", "0.4"):
        with host(code.replace("SECONDS", seconds), environment(daemon.path)) as process:
            assert finished(process, status=5) == "over\n"


def test_workers_forked_after_the_start_each_report_for_themselves(daemon: FakeDaemon) -> None:
    """Like gunicorn with --preload, which loads the application and the agent before the workers."""
    code = f"""{START}
import signal
sys.stdin.readline()
workers = []
for number in range(4):
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while True:
            time.sleep(0.01)
    workers.append(worker)
print(*workers, flush=True)
sys.stdin.readline()
for worker in workers:
    os.kill(worker, signal.SIGTERM)
print([os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers])
"""
    with host(code, environment(daemon.path)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        daemon.wait_message(Report, process.pid)
        process.stdin.write("fork\n")
        process.stdin.flush()
        workers = list(map(int, process.stdout.readline().split()))
        for pid in (process.pid, *workers):
            daemon.wait_message(Report, pid)
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.stdout.readline() == "[0, 0, 0, 0]\n"
        for pid in workers:
            daemon.wait_message(Goodbye, pid)
        finished(process)


def test_data_loader_works_with_forked_workers(daemon: FakeDaemon, tmp_path: Path) -> None:
    """Other workers start as Python does, and are those of test_launchers."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    program = tmp_path / "loads.py"
    program.write_text("""
import gpumond.agent
from torch.utils.data import DataLoader

if __name__ == "__main__":
    gpumond.agent.start(workload="loader")
    for _ in range(2):
        loader = DataLoader(range(64), batch_size=4, num_workers=2, multiprocessing_context="fork")
        print(sum(int(batch.sum()) for batch in loader))
""")
    command = f"import runpy, sys; sys.argv = [{str(program)!r}]; runpy.run_path({str(program)!r}, run_name='__main__')"
    with host(command, environment(daemon.path), "-W", "error") as process:
        assert finished(process) == 2 * "2016\n"


SUBINTERPRETERS = """
try:
    import _interpreters
except ImportError:
    import _xxsubinterpreters as _interpreters
def run(code, isolated):
    kind = ("isolated" if isolated else "legacy") if sys.version_info >= (3, 13) else isolated
    one = _interpreters.create(kind) if sys.version_info >= (3, 13) else _interpreters.create(isolated=isolated)
    failed = _interpreters.run_string(one, code)
    assert failed is None, failed
    _interpreters.destroy(one)
"""


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "legacy"])
def test_subinterpreter_does_not_affect_the_agent_of_the_program(daemon: FakeDaemon, isolated: bool) -> None:
    """A subinterpreter gets no agent, even where it may have threads: one left at its end would end the process."""
    code = f"""{START}{SUBINTERPRETERS}
sys.stdin.readline()
for seconds in (0, 0.25) * 5:
    run(f'''
import gpumond.agent, threading, time
gpumond.agent.start(workload="inner")
gpumond.agent.step()
time.sleep({{seconds}})
assert threading.active_count() == 1
gpumond.agent.flush()
''', {isolated})
print("done", flush=True)
sys.stdin.read()
"""
    with host(code, environment(daemon.path)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        daemon.wait_message(Report, process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        reports = len(daemon.received(Report, process.pid))
        daemon.wait(lambda d: d.received(Report, process.pid)[reports:] or None)
        finished(process)
        assert {hello.workload for hello in daemon.received(Hello)} == {"forks"}


@pytest.mark.skipif(find_spec("gevent") is None, reason="needs gevent (pip install gevent)")
def test_agent_ends_silently_if_gevent_gives_its_thread_another_identifier(daemon: FakeDaemon) -> None:
    import gevent

    code = f"""{START}
sys.stdin.readline()
sys.path.append({str(Path(gevent.__file__).parents[1])!r})
from gevent import monkey
monkey.patch_all()
gpumond.agent.stop()
print("done")
"""
    with host(code, environment(daemon.path)) as process:
        assert process.stdin is not None
        daemon.wait_message(Report, process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert finished(process) == "done\n"
