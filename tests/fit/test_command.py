"""`gpumond fit`: which commands it accepts, and what it says about others."""

from __future__ import annotations

import pytest

from gpumond.features.fit.command import split
from tests.helpers.running import gpumond_here


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --epochs 1", "train.py --epochs 1"),
        ("python -u train.py", "train.py"),
        ("python3.12 -X dev -W error -m package.train -v", "-m package.train -v"),
    ],
)
def test_options_of_the_interpreter_are_no_program(command: str, program: str):
    interpreter, rest = split(command.split())
    assert rest == program.split()
    assert [*interpreter, *rest] == command.split()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun train.py", "expected a Python program, such as: gpumond fit -- python train.py"),
        ("python", "expected a script or -m MODULE"),
        ("python -c pass", "expected a script or -m MODULE"),
        ("python /absent/train.py", "the script /absent/train.py doesn't exist"),
    ],
)
def test_other_commands_are_refused_with_what_was_expected(command: str, message: str):
    refused = gpumond_here("fit", "--", *command.split())
    assert refused.returncode == 2
    assert message in refused.stderr
