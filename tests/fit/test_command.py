"""`gpumond fit`: which commands it accepts, and what it says about others."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumond.features.fit.command import split_interpreter
from tests.fakenvml import Device, FakeDriver
from tests.helpers.running import gpumond, gpumond_here


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --epochs 1", "train.py --epochs 1"),
        ("python -u train.py", "train.py"),
        ("python3.12 -X dev -W error -m package.train -v", "-m package.train -v"),
    ],
)
def test_options_of_the_interpreter_are_no_program(command: str, program: str):
    interpreter, rest = split_interpreter(command.split())
    assert rest == program.split()
    assert [*interpreter, *rest] == command.split()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun train.py", "expected a Python program, as in `gpumond fit -- python train.py`"),
        ("python", "expected a script or -m MODULE"),
        ("python -c pass", "expected a script or -m MODULE"),
        ("python /absent/train.py", "the script /absent/train.py doesn't exist"),
    ],
)
def test_other_commands_are_refused_with_what_was_expected(command: str, message: str):
    refused = gpumond_here("fit", "--", *command.split())
    assert refused.returncode == 2
    assert message in refused.stderr


NO_DAEMON = ("--url", "http://127.0.0.1:9")
TRAIN = """
import sys, torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.randn(int(sys.argv[1]), 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_without_a_daemon_the_driver_is_read_once(train: Path, tmp_path: Path, nvml_library: Path):
    driver = FakeDriver(tmp_path, nvml_library, devices=[Device("GPU-a", total_bytes=24 << 30)])
    batch = ("fit", *NO_DAEMON, "--batch", "1..2", "--device", "0", "--", sys.executable, str(train), "{batch}")
    done = gpumond("fit", *NO_DAEMON, "--", sys.executable, str(train), "1", **driver.env)
    assert "assumed" not in done.stdout
    assert done.stdout.splitlines()[-1].split()[-1] == "now"
    assert gpumond(*batch, **driver.env).stdout.endswith(" of 24.0 GiB\n")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_progress_is_told_while_the_program_runs(tmp_path: Path):
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(3)")
    done = gpumond("fit", *NO_DAEMON, "--", sys.executable, str(script))
    assert re.search(
        r"^gpumond: waiting for the program's optimizer to complete two steps \(\d s so far\)",
        done.stderr,
        re.MULTILINE,
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_assumed_size_of_a_gpu_is_stated(train: Path):
    assumed = "assumed: a GPU of 80.0 GiB, because neither the daemon nor the driver reports one"
    assert assumed in gpumond("fit", *NO_DAEMON, "--", sys.executable, str(train), "1").stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_program_without_an_optimizer_has_unknown_classes(tmp_path: Path):
    script = tmp_path / "infer.py"
    script.write_text('import torch\nmodel = torch.nn.Linear(1024, 1024, device="cuda")')
    done = gpumond("fit", *NO_DAEMON, "--", sys.executable, str(script))
    assert "assumed: the program doesn't train" in done.stdout
    assert "parameters" not in done.stdout
