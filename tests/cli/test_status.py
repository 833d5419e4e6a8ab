"""Notes that `gpumond status` prints after its tables."""

from __future__ import annotations

from gpumond.cli.status import notes
from gpumond.model.frame import Verdict
from gpumond.model.verdicts import REMEDIES
from gpumond.top.view import view
from tests.top.frames import busy_frame


def test_verdict_is_followed_by_its_remedy():
    leak = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, summary="train (pid 10) grows")
    release = Verdict(
        device_uuid="GPU-a",
        pid=11,
        start_ticks=100,
        kind="release",
        since=1.0,
        summary="serve (pid 11) freed 2.0 GiB of GPU 0",
    )
    *_, text = notes(view(busy_frame(verdicts=(leak, release))))
    assert text.splitlines() == [
        "verdict leak: train (pid 10) grows",
        f"      -> {REMEDIES['leak']}",
        "verdict release: serve (pid 11) freed 2.0 GiB of GPU 0",
    ]
