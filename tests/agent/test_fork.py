"""Forking, spawning and exec: no deadlock, no descriptor of the parent's, and every process speaks for itself."""

from __future__ import annotations

import pytest

from gpumond.wire import Bye, Hello, Report
from tests.agent.daemon import Daemon, environment, finished, host

START = "import os, sys, time, gpumond.agent; gpumond.agent.start(workload='forks')\n"


def test_a_forked_child_reports_under_its_own_pid_and_the_parent_goes_on(daemon: Daemon) -> None:
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
        parents = len(daemon.heard(Report, process.pid))
        daemon.wait(lambda d: d.heard(Report, process.pid)[parents:] or None)
        finished(process)
        daemon.wait_message(Bye, child)
        daemon.wait_message(Bye, process.pid)
        assert [len(daemon.heard(Hello, pid)) for pid in (process.pid, child)] == [1, 1]
        assert {peer.pid for peer in daemon.peers} == {process.pid, child}


@pytest.mark.parametrize("when", ["at once", "while the agent starts", "while it runs"])
def test_many_forks_at_any_moment_do_not_hang(daemon: Daemon, when: str) -> None:
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


def test_forks_from_a_thread_do_not_hang(daemon: Daemon) -> None:
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
        heard = len(daemon.heard(Report, process.pid))
        daemon.wait(lambda d: d.heard(Report, process.pid)[heard:] or None)
        finished(process)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_do_their_work(daemon: Daemon, method: str) -> None:
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


def test_programs_started_by_the_host_inherit_no_descriptor(daemon: Daemon) -> None:
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
        assert first == second == third == str(["0", "1", "2", "3"])  # 3 is that of the listing


def test_python_does_not_warn_of_a_fork_with_threads_because_of_the_agent(daemon: Daemon) -> None:
    """Python has such a warning since 3.12."""
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
        heard = len(daemon.heard(Report, process.pid))
        daemon.wait(lambda d: d.heard(Report, process.pid)[heard:] or None)
        finished(process)
