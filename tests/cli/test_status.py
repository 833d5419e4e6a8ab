"""Notes that `gpumond status` prints after its tables."""

from __future__ import annotations

from gpumond.cli.status import notes
from gpumond.model.frame import Verdict
from gpumond.model.remedies import VERDICTS
from gpumond.rules.verdicts import TROUBLES
from gpumond.top.view import view
from tests.top.frames import a_busy_frame


def test_a_verdict_has_its_remedy_below_it():
    leak = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, summary="train (pid 10) grows")
    release = Verdict(
        device_uuid="GPU-a", pid=11, start_ticks=100, kind="release", since=1.0, summary="serve (pid 11) has ended"
    )
    *_, said = notes(view(a_busy_frame(verdicts=(leak, release))))
    assert said.splitlines() == [
        "verdict leak: train (pid 10) grows",
        f"      -> {VERDICTS['leak']}",
        "verdict release: serve (pid 11) has ended",
    ]


def test_each_trouble_has_a_remedy():
    assert set(VERDICTS) == set(TROUBLES)
