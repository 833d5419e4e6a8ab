"""What a daemon said of its snapshots is what is said of them later, from a recording."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.config import Settings
from gpumond.daemon import Daemon
from gpumond.diagnosis import Diagnosis, diagnose
from gpumond.engine import EngineState, advance
from gpumond.history import Point
from gpumond.loadgen import plan
from gpumond.model.frame import Frame, Verdict
from gpumond.model.snapshot import Snapshot
from gpumond.protocol.messages import from_json, to_json
from gpumond.sim.card import Spec, create
from gpumond.testing import GIB
from tests.simulator.snapshots import snapshots

PACE = 60.0
UUID = "GPU-51300000-0000-4000-8000-000000000001"


def test_the_engine_says_of_each_snapshot_what_the_diagnosis_says_of_its_recording():
    memory, replayed, kinds = EngineState(), Diagnosis(), set()
    for snapshot in snapshots(plan("leak-linear", seed=1), every=4.0):
        tick = advance(memory, (), snapshot)
        memory = tick.memory
        replayed = diagnose(replayed, from_json(Snapshot, to_json(snapshot)))
        assert replayed.verdicts == tick.frame.verdicts
        kinds |= {verdict.kind for verdict in replayed.verdicts}
    assert "leak" in kinds


@pytest.fixture
def collecting_garbage() -> Iterator[None]:
    """A daemon in this process leaves it to itself when."""
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a simulated device, on which a program with an agent works."""
    monkeypatch.setenv("GPUMOND_SIM_DIR", str(tmp_path / "cards"))
    card = tmp_path / "cards" / "card0"
    create(card, Spec(UUID, 0, "Simulated", 24 * GIB, GIB))
    command = [sys.executable, "-m", "gpumond.sim.programs", "training", "--card", str(card), "--speed", "60"]
    running = subprocess.Popen(command, env=os.environ | {"GPUMOND_SOCKET": str(tmp_path / "agent.sock")})
    yield tmp_path
    running.terminate()
    running.wait(20)


class Recorded(Daemon):
    """Keeps all its frames."""

    def __init__(self, settings: Settings, pace: float) -> None:
        super().__init__(settings, "sim", pace=pace)
        self.frames: list[Frame] = []

    async def tick(self) -> None:
        await super().tick()
        assert self.frame is not None
        self.frames.append(self.frame)


def a_daemon(directory: Path, pace: float, socket: str = "agent.sock") -> Recorded:
    settings = Settings(socket=directory / socket, state_dir=directory / "state", interval=0.1)
    return Recorded(settings, pace)


async def recorded(directory: Path) -> list[Frame]:
    """Every frame of a daemon, until it has had enough to say."""
    daemon = a_daemon(directory, PACE)
    end = time.monotonic() + 60
    async with daemon.running():
        while len({verdict.kind for frame in daemon.frames for verdict in frame.verdicts}) < 2:
            assert time.monotonic() < end, "the daemon had nothing to say"
            await asyncio.sleep(0.05)
    return daemon.frames


def onsets(verdicts: list[tuple[Verdict, ...]]) -> list[set[tuple[str, int | None, str]]]:
    """What began with each snapshot."""
    said = [{(verdict.device_uuid, verdict.pid, verdict.kind) for verdict in each} for each in verdicts]
    return [now - before for before, now in zip([set(), *said], said, strict=False)]


def test_a_recording_of_a_running_daemon_brings_the_verdicts_that_it_gave(program: Path, collecting_garbage: None):
    frames = asyncio.run(recorded(program))
    assert [frame.snapshot.seq for frame in frames] == list(range(1, len(frames) + 1))
    recording = [to_json(frame.snapshot) for frame in frames]
    diagnosis, replayed = Diagnosis(PACE), []
    for line in recording:
        diagnosis = diagnose(diagnosis, from_json(Snapshot, line))
        replayed.append(diagnosis.verdicts)
    given = [frame.verdicts for frame in frames]
    assert onsets(replayed) == onsets(given)
    assert replayed == given
    assert any(verdict.pid for verdict in given[-1])


def test_what_a_daemon_saw_of_a_device_and_a_program_is_known_to_the_next(program: Path, collecting_garbage: None):
    async def seen(wanted: int, socket: str) -> dict[int | None, tuple[Point, ...]]:
        """Blocks of 15 minutes, each of which takes a second here."""
        daemon = a_daemon(program, 900.0, socket)
        end = time.monotonic() + 60
        async with daemon.running():
            while True:
                assert time.monotonic() < end, "too little was seen"
                await asyncio.sleep(0.05)
                devices = daemon.frame.snapshot.devices if daemon.frame else ()
                pids = [None, *(process.pid for device in devices for process in device.processes or ())]
                past = {pid: daemon.history.series(UUID, pid, "used", resolution=900)[:-1] for pid in pids}
                if len(past) == 2 and min(map(len, past.values())) >= wanted:
                    return past

    before, after = asyncio.run(seen(2, "agent.sock")), asyncio.run(seen(3, "other.sock"))
    for pid, points in before.items():
        assert [point[1:] for point in after[pid][: len(points)]] == [point[1:] for point in points]
        assert after[pid][0].at == pytest.approx(points[0].at, abs=0.5)
