"""A Jupyter kernel that is suspended between two cells for a training job, and resumes by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from gpumond.sim.device import MIB, SimDevice
from tests.fakecuda import FakeCuda
from tests.helpers.agent_daemon import environment
from tests.helpers.running import RunningDaemon, until
from tests.suspend.programs import CONTEXT, HELD, is_reported, output, row

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")

FIRST = """
%load_ext gpumond.jupyter
import os, gpumond.agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import SimDevice
gpumond.agent.start(workload="notebook")
allocator = CachingAllocator(SimDevice(DIRECTORY))
kept = allocator.malloc(SIZE)
print(os.getpid())
"""


def text(cell: object) -> str:
    return "".join(each.get("text", "") for each in cell["outputs"])  # type: ignore[index]


TRAIN = """
import sys
import gpumond.agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import SimDevice
gpumond.agent.start()
allocator = CachingAllocator(SimDevice(DIRECTORY))
kept = allocator.malloc(SIZE)
print("trains", flush=True)
sys.stdin.read()
"""


def end_when_awaited(cell: object, train: subprocess.Popen[str]) -> None:
    until(lambda: "waiting" in text(cell))
    train.communicate("")


def test_notebook_and_training_job_share_a_device(
    daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody suspends or resumes: the job needs the memory, and the next cell needs it back."""
    for name, value in {**environment(daemon.socket), **daemon.environ, "GPUMOND_URL": daemon.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GPUMOND_RUNTIME_DIR", str(daemon.directory))
    place = repr(str(device.directory))
    first = FIRST.replace("DIRECTORY", place).replace("SIZE", str(HELD))
    cells = [nbformat.v4.new_code_cell(code) for code in (first, "allocator.free(kept)", "print('plain')")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120)
    with client.setup_kernel():
        client.execute_cell(cells[0], 0)
        pid = int(text(cells[0]))
        until(lambda: is_reported(daemon, pid))
        until(lambda: daemon.get("agents")[0]["may_suspend"])
        job = TRAIN.replace("DIRECTORY", place).replace("SIZE", str(700 * MIB))
        command = [sys.executable, "-m", "gpumond", "run", "--workload", "train", "--need", "724MiB", "--wait", "1m"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([*command, "--", sys.executable, "-c", job], text=True, **pipes) as train:
            assert output(train) == "trains"
            assert cuda.state(pid) == "checkpointed"
            until(lambda: is_reported(daemon, train.pid, 700 * MIB))
            ended = threading.Thread(target=end_when_awaited, args=(cells[1], train))
            ended.start()
            client.execute_cell(cells[1], 1)
            ended.join()
        shown = text(cells[1])
        assert "this notebook is suspended" in shown
        assert f"largest program is train (pid {train.pid}" in shown
        assert "resumed after" in shown
        assert (train.returncode, cuda.state(pid)) == (0, "running")
        until(lambda: row(daemon, pid).get("cached_bytes") == HELD)
        assert device.read().used_bytes == HELD + CONTEXT
        client.execute_cell(cells[2], 2)
        assert text(cells[2]) == "plain\n"
        os.kill(pid, 0)
