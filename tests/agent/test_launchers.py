"""Real launchers under `gpumond run`: each Python that they start has the agent, and their behavior is unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumond.facts.messages import Goodbye, Hello, Report
from tests.helpers.agent_daemon import FakeDaemon, environment
from tests.helpers.running import until

SECONDS = 100
RUN = [sys.executable, "-m", "gpumond", "run", "--workload", "train/a", "--"]
QUIET = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]

STAY = """
import os, pathlib, time
def stay():
    pathlib.Path(f"{os.getpid()}.pid").touch()
    while not pathlib.Path("end").exists():
        time.sleep(0.01)
"""
"""Program that creates a file in the common directory and stays until it is asked to end."""

TORCH = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); first = d.get_rank() == 0"
TORCH_ENDS = "d.barrier(); d.destroy_process_group()"
ACCELERATE = "import accelerate; a = accelerate.Accelerator(cpu=True); first = a.is_main_process"
ACCELERATE_ENDS = "a.wait_for_everyone(); a.end_training()"

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("torch") is None, reason="needs PyTorch and accelerate"
)
needs_jupyter = pytest.mark.skipif(
    find_spec("ipykernel") is None or find_spec("nbclient") is None, reason="needs ipykernel and nbclient"
)


def installed(command: str) -> str:
    """Return the path of the command in this Python's environment."""
    return os.fspath(Path(sys.executable).with_name(command))


def own_environment(daemon: FakeDaemon, home: Path) -> dict[str, str]:
    """Environment with these commands and without the user's settings for them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hugging_face = os.fspath(home / "hugging-face")
    return environment(daemon.path, PATH=path, HOME=os.fspath(home), HF_HOME=hugging_face, OMP_NUM_THREADS="1")


@contextmanager
def launched(daemon: FakeDaemon, directory: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = own_environment(daemon, directory)
    with subprocess.Popen([*RUN, *command], env=environ, cwd=directory, text=True, **pipes) as process:
        try:
            yield process
        finally:
            (directory / "end").touch()
            process.kill()


def started(directory: Path, number: int, launcher: subprocess.Popen[str]) -> set[int]:
    """Wait until this number of programs have started."""

    def enough() -> bool:
        assert launcher.poll() is None, launcher.communicate()
        return len(list(directory.glob("*.pid"))) >= number

    until(enough, SECONDS)
    return {int(path.stem) for path in directory.glob("*.pid")}


def ended(process: subprocess.Popen[str], directory: Path) -> tuple[int, str, str]:
    """Return exit status, output and errors, without a warning of Python: its resource tracker may remove a semaphore
    at the same time as the program does.
    """
    (directory / "end").touch()
    out, err = process.communicate(timeout=SECONDS)
    lines = [line for line in err.splitlines(keepends=True) if "resource_tracker" not in line]
    return process.returncode, out, "".join(lines)


@pytest.mark.parametrize(
    ("command", "begins", "ends"),
    [
        pytest.param(["torchrun", "--standalone", "--nproc-per-node=2"], TORCH, TORCH_ENDS, marks=needs_torch),
        pytest.param(
            ["accelerate", "launch", "--multi_gpu", "--num_processes=2", *QUIET],  # on processors, as there is no GPU
            ACCELERATE,
            ACCELERATE_ENDS,
            marks=needs_accelerate,
        ),
    ],
    ids=["torchrun", "accelerate"],
)
def test_ranks_of_a_launcher_each_have_the_agent(
    daemon: FakeDaemon, tmp_path: Path, command: list[str], begins: str, ends: str
) -> None:
    (tmp_path / "train.py").write_text(f"{STAY}import sys\n{begins}\nstay()\nif first: print(sys.argv[1:])\n{ends}\n")
    launcher, *options = command
    with launched(daemon, tmp_path, installed(launcher), *options, "train.py", "--epochs", "3") as process:
        pids = started(tmp_path, 2, process)
        assert len(pids) == 2
        assert {daemon.wait_message(Hello, pid).workload for pid in (process.pid, *pids)} == {"train/a"}
        programs = [daemon.wait_message(Report, pid).program for pid in pids]
        assert [program.distributed for program in programs] == [True, True]
        assert ended(process, tmp_path) == (0, "['--epochs', '3']\n", "")
        for pid in (process.pid, *pids):
            daemon.wait_message(Goodbye, pid)


@needs_accelerate
def test_launcher_reports_the_failure_of_its_program(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('failing'); sys.exit(3)")
    command = [installed("accelerate"), "launch", "--cpu", "--num_processes=1", *QUIET, "train.py"]
    environ = own_environment(daemon, tmp_path)
    plain, carried = (
        subprocess.run(whole, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
        for whole in (command, [*RUN, *command])
    )
    assert "non-zero exit status 3" in plain.stderr
    assert (carried.returncode, carried.stdout, carried.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert {hello.workload for hello in daemon.received(Hello)} == {"train/a"}


def notebook(source: str) -> str:
    cell = {"cell_type": "code", "execution_count": None, "id": "one", "metadata": {}, "outputs": [], "source": source}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return json.dumps({"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})


@needs_jupyter
@pytest.mark.parametrize(
    "command", [["jupyter", "execute", "--inplace", "work.ipynb"], ["jupyter", "run", "work.py"]], ids=lambda c: c[1]
)
def test_jupyter_kernel_has_the_agent(daemon: FakeDaemon, tmp_path: Path, command: list[str]) -> None:
    source = f"{STAY}stay()\nprint('worked')"
    (tmp_path / "work.py").write_text(source)
    (tmp_path / "work.ipynb").write_text(notebook(source))
    name, *arguments = command
    with launched(daemon, tmp_path, installed(name), *arguments) as process:
        (kernel,) = started(tmp_path, 1, process)
        assert kernel != process.pid
        assert {daemon.wait_message(Hello, pid).workload for pid in (process.pid, kernel)} == {"train/a"}
        status, out, err = ended(process, tmp_path)
        assert (status, "gpumond" in err) == (0, False), err
    (cell,) = json.loads((tmp_path / "work.ipynb").read_text())["cells"]
    printed = "".join(cell["outputs"][0]["text"]) if arguments[0] == "execute" else out
    assert printed == "worked\n"


CLIENT = """
import os, pathlib, time
from jupyter_client import KernelManager
manager = KernelManager(transport="ipc")  # another program may take a TCP port before the kernel binds it
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=100)
begins = "import os, pathlib, time; pathlib.Path(f'{os.getpid()}.pid').touch()"
def run(code):
    status = "aborted"
    while status == "aborted":  # a kernel aborts the requests that arrive just after an error
        status = client.execute(code, reply=True, timeout=100)["content"]["status"]
    assert status == "ok", status
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.01)
run(begins)
client.execute("pathlib.Path('busy').touch(); time.sleep(100)")
wait("busy")
manager.interrupt_kernel()
assert client.get_shell_msg(timeout=100)["content"]["ename"] == "KeyboardInterrupt"
run("pass")
manager.restart_kernel()
client.wait_for_ready(timeout=100)
run(begins)
wait("end")
client.stop_channels()
manager.shutdown_kernel()
print("well")
"""


@needs_jupyter
def test_jupyter_kernel_is_interrupted_restarted_and_shut_down(daemon: FakeDaemon, tmp_path: Path) -> None:
    with launched(daemon, tmp_path, sys.executable, "-c", CLIENT) as process:
        kernels = started(tmp_path, 2, process)
        assert {daemon.wait_message(Hello, pid).workload for pid in kernels} == {"train/a"}
        status, out, err = ended(process, tmp_path)
        assert (status, out) == (0, "well\n"), err
        for pid in kernels:
            daemon.wait_message(Goodbye, pid)


POOL = """
import multiprocessing
def work(number):
    stay()
    return number
if __name__ == "__main__":
    with multiprocessing.get_context("METHOD").Pool(2) as pool:
        print(sum(pool.map(work, (1, 2), chunksize=1)))
"""

LOADER = """
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, number):
        stay()
        return number + 1
if __name__ == "__main__":
    print(sum(int(batch) for batch in DataLoader(Numbers(), num_workers=2, multiprocessing_context="METHOD")))
"""


@pytest.mark.parametrize(
    ("program", "method"),
    [
        *((POOL, method) for method in ("fork", "spawn", "forkserver")),
        *(pytest.param(LOADER, method, marks=needs_torch) for method in ("fork", "spawn")),
    ],
    ids=["pool-fork", "pool-spawn", "pool-forkserver", "DataLoader-fork", "DataLoader-spawn"],
)
def test_workers_of_a_pool_each_have_the_agent(daemon: FakeDaemon, tmp_path: Path, program: str, method: str) -> None:
    (tmp_path / "train.py").write_text(STAY + program.replace("METHOD", method))
    with launched(daemon, tmp_path, sys.executable, "train.py") as process:
        workers = started(tmp_path, 2, process)
        assert process.pid not in workers
        assert {daemon.wait_message(Hello, pid).workload for pid in (process.pid, *workers)} == {"train/a"}
        assert ended(process, tmp_path) == (0, "3\n", "")
