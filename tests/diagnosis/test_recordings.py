"""Verdicts on logs of real devices. tests/fixtures/recordings/README.md states their origin and the expectations."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpumond.facts.verdicts import PROBLEM_KINDS

pytestmark = pytest.mark.slow

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "recordings"
MAX_BYTES = 1 << 20


class Expected(NamedTuple):
    """A verdict whose onset is between ``start`` and ``latest`` and whose end is in ``end``, if the log contains it."""

    kind: str
    start: str | float
    latest: str | float
    end: tuple[str | float, str | float] | None = None


class Recording(NamedTuple):
    file: str
    expected: tuple[Expected, ...] = ()
    options: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    """Kinds that apply according to the README and that gpumond need not report."""


DAY = "2024-11-01"
ALL = (
    Recording("two-devices.csv"),
    Recording("holder.csv"),
    Recording("pipeline.csv", options=("--size", "80GiB"), missed=("leak",)),
    Recording(
        "epochs.csv",
        (
            Expected(
                "pressure",
                "2024-08-16T23:19:55",
                "2024-08-16T23:19:55",
                ("2024-08-17T03:41:50", "2024-08-17T03:41:50"),
            ),
        ),
    ),
    Recording("epochs-of-steps.csv", options=("--size", "46068MiB")),
    Recording("shared-device.csv"),
    Recording("fills-and-ends.csv", (Expected("pressure", 19437, 19437),)),
    Recording("aerial-tiles.csv"),
    Recording("aerial-hold-begins.csv", (Expected("idle-holder", f"{DAY}T03:11:47", f"{DAY}T03:17:00"),)),
    Recording(
        "aerial-hold-ends.csv",
        (Expected("idle-holder", f"{DAY}T05:31:34", f"{DAY}T05:33:05", (f"{DAY}T07:09:30", f"{DAY}T07:11:30")),),
    ),
    Recording("tables.log"),
    Recording("card-h200.csv", (Expected("pressure", 804, 804),)),
)


def seconds(at: str | float) -> float:
    return datetime.fromisoformat(at).replace(tzinfo=timezone.utc).timestamp() if isinstance(at, str) else at


def problems(recording: Recording) -> list[dict[str, Any]]:
    """Return the changes of verdicts that indicate a problem."""
    command = [sys.executable, "-m", "gpumond", "diagnose", str(RECORDINGS / recording.file), "--json"]
    done = subprocess.run([*command, *recording.options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = {kind.name for kind in PROBLEM_KINDS} - set(recording.missed)
    return [change for change in map(json.loads, done.stdout.splitlines()) if change["kind"] in kinds]


@pytest.mark.parametrize("recording", ALL, ids=[recording.file for recording in ALL])
def test_verdicts_on_a_real_recording_are_the_expected_ones(recording: Recording):
    changes = problems(recording)
    onsets = [change for change in changes if change["onset"]]
    assert [change["kind"] for change in onsets] == [expected.kind for expected in recording.expected], onsets
    for expected, onset in zip(recording.expected, onsets, strict=True):
        assert seconds(expected.start) <= onset["time"] <= seconds(expected.latest), onset
        ends = [change["time"] for change in changes if not change["onset"] and change["kind"] == expected.kind]
        assert len(ends) == (expected.end is not None), ends
        if expected.end is not None:
            assert seconds(expected.end[0]) <= ends[0] <= seconds(expected.end[1])


def test_recordings_are_small_and_have_an_origin():
    files = [path for path in RECORDINGS.iterdir() if path.name != "README.md"]
    readme = (RECORDINGS / "README.md").read_text().replace("aerial-*", "aerial-tiles")
    origins = readme.partition("## Origin")[2].partition("## What is known")[0]
    assert {path.name for path in files} == {recording.file for recording in ALL}
    assert all(f"`{path.name}`" in readme for path in files)
    assert all(f"`{path.name}`" in origins for path in files if not path.name.startswith("aerial-hold"))
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
