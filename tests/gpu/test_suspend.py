"""Suspension on a real device: a PyTorch program continues bit by bit, and a Jupyter kernel resumes by itself.

Needs the packages torch (CUDA), nbclient and ipykernel; driver 570 or newer. `bench/gpu_suspend.py` has more cycles.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import gpu_suspend
from tests.helpers.agent_daemon import environment
from tests.helpers.running import RunningDaemon, until

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs an NVIDIA device")
    with gpu_suspend.serving(tmp_path) as started:
        yield started


def test_program_continues_bit_by_bit_after_each_of_three_cycles(daemon: RunningDaemon) -> None:
    found = gpu_suspend.cycles(daemon, 8, 3)
    assert (found.get("equal"), found.get("count_was_0"), found.get("memory_taken_meanwhile")) == (3, 3, 3), found


def test_each_guarded_case_is_refused(daemon: RunningDaemon) -> None:
    found = gpu_suspend.refusals(daemon)
    assert [case for case, refused in found.items() if refused is not True] == [], json.dumps(found, indent=1)


def test_rule_suspends_an_idle_program(daemon: RunningDaemon) -> None:
    assert gpu_suspend.by_rule(daemon) == {"count_is_0": True, "resumed": "resumed", "equal": True}


def test_kernel_resumes_before_a_cell_runs(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name, value in {**environment(daemon.socket), "GPUMOND_URL": daemon.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GPUMOND_RUNTIME_DIR", str(daemon.directory))
    codes = (
        "%load_ext gpumond.jupyter\nimport os, torch, gpumond.agent\ngpumond.agent.start(workload='notebook')\n"
        "kept = torch.arange(2 << 28, device='cuda')\nprint(os.getpid())",
        "print(int(kept[-1]))",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    first, second = notebook.cells
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300)
    text: Callable[[object], str] = lambda cell: "".join(each.get("text", "") for each in cell["outputs"])  # type: ignore[index] # noqa: E731
    with client.setup_kernel():
        client.execute_cell(first, 0)
        pid = int(text(first))
        until(
            lambda: gpu_suspend.driver_bytes(daemon, pid) and any(each["suspendable"] for each in daemon.get("agents")),
            60,
        )
        assert gpu_suspend.ask(daemon, "suspensions", target={"pid": pid})["outcome"] == "suspended"
        client.execute_cell(second, 1)
        assert "resumed after" in text(second)
        assert text(second).endswith(f"{(2 << 28) - 1}\n")
