"""Results of loads: kept in a file, and compared with the last one like them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.units import GIB
from gpumond.features.loadgen.runner import regressions
from gpumond.sim.device import SimDevice, Spec, create
from tests.loadgen.loads import CONTEXT, SIZE, load

LOAD = ("stress", "--fill", "50%", "--duration", "1s", "--speed", "3000", "--no-agent")


def card(directory: Path, size: int = SIZE) -> SimDevice:
    return create(directory, Spec("SIM-load", 0, "Simulated", size, context_bytes=CONTEXT))


def results(file: Path) -> list[dict[str, Any]]:
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append({})
    return found


def test_results_are_appended_and_compared_with_the_last_complete_one(tmp_path: Path):
    device, file = card(tmp_path / "card"), tmp_path / "results.jsonl"
    file.write_text('{"outcome": "do')  # the machine stopped
    status, out, err = load(device, *LOAD, "--report", str(file))
    assert (status, "first result of this load on this device: no regression" in out) == (0, True), err
    empty = create(tmp_path / "missing", Spec("SIM-load", 0, "Simulated", SIZE))
    (empty.directory / "card.json").unlink()
    status, _, err = load(empty, *LOAD, "--report", str(file))
    assert status == 1
    status, out, err = load(device, *LOAD, "--json", "--report", str(file))
    assert status == 0, err
    incomplete, first, failed, last = results(file)
    assert incomplete == {}
    assert (first["compared_with"], first["regressions"], first["outcome"]) == (None, [], "done")
    assert failed["outcome"] == "error"
    assert failed["regressions"] == [f"the load couldn't run: {failed['detail']}"]
    assert json.loads(out)["compared_with"] == last["compared_with"] == first["started_at"]
    assert first["version"] == last["version"]
    status, _, _ = load(device, *LOAD[:-1], "--seed", "5", "--report", str(file))
    assert (status, results(file)[-1]["compared_with"]) == (0, None)


def test_smaller_peak_is_a_regression(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    assert load(card(tmp_path / "card"), *LOAD, "--report", str(file))[0] == 0
    status, out, _ = load(card(tmp_path / "smaller", SIZE // 2), *LOAD, "--report", str(file))
    assert status == 1
    assert "UTC: the peak of live memory fell from 4.0 GiB to " in out


def test_file_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path):
    status, out, err = load(card(tmp_path / "card"), *LOAD, "--report", str(tmp_path / "no" / "results"))
    assert (status, out) == (2, "")
    assert "--report" in err


DONE = {"outcome": "done", "detail": "", "wrong_words": 0, "checked_bytes": 5, "peak_live_bytes": 8 * GIB}


@pytest.mark.parametrize(
    ("now", "before", "found"),
    [
        ({}, None, []),
        ({}, {}, []),
        ({"wrong_words": 3}, None, ["3 incorrect words"]),
        ({"wrong_words": 3, "outcome": "stopped"}, {}, ["3 incorrect words"]),
        ({"outcome": "stopped", "peak_live_bytes": 1}, {}, []),
        ({"outcome": "full", "detail": "refused"}, {}, ["the load ended early: refused"]),
        ({"checked_bytes": 0}, {}, ["no contents were verified"]),
        ({"checked_bytes": 0}, {"checked_bytes": 0}, []),
        ({"peak_live_bytes": 7 * GIB}, {}, ["the peak of live memory fell from 8.0 GiB to 7.0 GiB"]),
        ({"peak_live_bytes": 7 * GIB}, {"peak_live_bytes": None}, []),
        ({"peak_live_bytes": 9 * GIB}, {}, []),
    ],
)
def test_regressions(now: dict[str, Any], before: dict[str, Any] | None, found: list[str]):
    assert regressions(DONE | now, None if before is None else DONE | before) == found
