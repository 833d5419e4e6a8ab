"""A Jupyter kernel that is suspended between two cells, and resumes by itself."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from gpumond.sim.device import MIB, SimDevice
from tests.fakecuda import FakeCuda
from tests.helpers.agent_daemon import environment
from tests.helpers.running import RunningDaemon, until
from tests.suspend.programs import CONTEXT, HELD, is_reported, output, program, row, suspend

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


def end_when_awaited(cell: object, train: subprocess.Popen[str]) -> None:
    until(lambda: "waiting" in text(cell))
    train.kill()


def test_kernel_resumes_before_a_cell_runs(
    daemon: RunningDaemon, device: SimDevice, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environment(daemon.socket), "GPUMOND_URL": daemon.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GPUMOND_RUNTIME_DIR", str(daemon.directory))
    first = FIRST.replace("DIRECTORY", repr(str(device.directory))).replace("SIZE", str(HELD))
    cells = [nbformat.v4.new_code_cell(code) for code in (first, "allocator.free(kept)", "print('plain')")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120)
    with client.setup_kernel():
        client.execute_cell(cells[0], 0)
        pid = int(text(cells[0]))
        until(lambda: is_reported(daemon, pid))
        until(lambda: daemon.get("agents")[0]["suspendable"])
        assert suspend(daemon, pid)["outcome"] == "suspended"
        with program(daemon, device, "train", 700 * MIB, suspendable=False) as train:
            assert output(train) == "ready"
            until(lambda: is_reported(daemon, train.pid, 700 * MIB))
            ended = threading.Thread(target=end_when_awaited, args=(cells[1], train))
            ended.start()
            client.execute_cell(cells[1], 1)
            ended.join()
        shown = text(cells[1])
        assert "this notebook is suspended" in shown
        assert f"held by train (pid {train.pid}" in shown
        assert "resumed after" in shown
        assert cuda.state(pid) == "running"
        until(lambda: row(daemon, pid).get("cached_bytes") == HELD)
        assert device.read().used_bytes == HELD + CONTEXT
        client.execute_cell(cells[2], 2)
        assert text(cells[2]) == "plain\n"
        os.kill(pid, 0)
