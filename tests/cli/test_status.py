"""Notes that `gpumond status` prints after its tables."""

from __future__ import annotations

from gpumond.cli.status import notes
from gpumond.model.frame import Verdict
from gpumond.model.verdicts import REMEDIES
from gpumond.top.view import view
from tests.top.frames import a_busy_frame


def test_a_verdict_has_its_remedy_below_it():
    leak = Verdict("GPU-a", 10, "leak", 1.0, summary="train (pid 10) grows")
    release = Verdict("GPU-a", 11, "release", 1.0, summary="serve (pid 11) has ended")
    *_, said = notes(view(a_busy_frame(verdicts=(leak, release))))
    assert said.splitlines() == [
        "verdict leak: train (pid 10) grows",
        f"      -> {REMEDIES['leak']}",
        "verdict release: serve (pid 11) has ended",
    ]
