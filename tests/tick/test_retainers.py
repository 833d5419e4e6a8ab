"""The line or scope that keeps the memory of a leak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond.diagnosis.sentences import with_retainers
from gpumond.facts.frame import Verdict
from gpumond.facts.program import ByteChange, Program, Retainer, ScopeDevice, ScopeUsage
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_report, make_snapshot

LEAK = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, summary="train grows")
RETAINER = Retainer(file="/home/a/train.py", line=31, function="train", name="losses", size_bytes=GIB, tensors=12)


def scope(name: str, kept: int, last: int, entries: int = 5) -> ScopeUsage:
    device = ScopeDevice("GPU-a", ByteChange(kept), ByteChange(last), 0)
    return ScopeUsage(name=name, entries=entries, devices=(device,))


def summary(program: Program, verdict: Verdict = LEAK) -> str:
    snapshot = make_snapshot(make_device(), reports=(make_report(program=program),))
    (found,) = with_retainers([verdict], snapshot)
    assert found.summary.removeprefix(verdict.summary).removeprefix("; ") == found.retained_by
    return found.summary


def test_leak_names_the_line_that_retains_its_memory():
    text = "train grows; `losses` in `train` at /home/a/train.py:31 (12 tensors added in 20 s) retains the memory"
    scopes = (scope("epoch", 5 * GIB, GIB),)
    assert summary(Program(retainers=(RETAINER,), scopes=scopes)) == text
    both = (RETAINER, replace(RETAINER, name="", line=50))
    assert summary(Program(retainers=both)).endswith(
        " and `train` at /home/a/train.py:50 (12 tensors added in 20 s) retain the memory"
    )
    package = replace(RETAINER, file="/venv/lib/python3.11/site-packages/trainer/loop.py")
    assert "at trainer/loop.py:31 (" in summary(Program(retainers=(package,)))


@pytest.mark.parametrize(
    ("scopes", "text"),
    [
        (
            (scope("epoch", 5 * GIB, GIB), scope("load", GIB, GIB)),
            "train grows; the measured scope epoch retains 5.0 GiB",
        ),
        ((scope("set-up", 5 * GIB, GIB, entries=1),), "train grows"),
        ((scope("epoch", 5 * GIB, 0),), "train grows"),
        ((), "train grows"),
    ],
)
def test_leak_names_the_scope_if_no_line_is_known(scopes: tuple[ScopeUsage, ...], text: str):
    assert summary(Program(scopes=scopes)) == text


def test_other_verdicts_and_unknown_programs_are_unchanged():
    program = Program(retainers=(RETAINER,))
    assert summary(program, replace(LEAK, kind="steady")) == "train grows"
    assert summary(program, replace(LEAK, kind="growing")).startswith("train grows; `losses` in ")
    assert summary(program, replace(LEAK, start_ticks=101)) == "train grows"
    assert summary(program, replace(LEAK, pid=None, start_ticks=None)) == "train grows"
