"""Verdicts of a daemon equal those of a replay of its recorded snapshots."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.config.settings import Settings
from gpumond.daemon.daemon import Daemon, system_dependencies
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Frame, Verdict
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import Snapshot
from gpumond.features.loadgen.plan import plan
from gpumond.sim.device import DeviceSpec, create
from gpumond.tick.history import Point
from tests.helpers.agents import GIB
from tests.helpers.simulated_snapshots import snapshots
from tests.helpers.values import TickState, advance

SPEEDUP = 60.0
UUID = "GPU-51300000-0000-4000-8000-000000000001"


def test_diagnosis_of_a_recording_equals_that_of_the_engine():
    memory, replayed, kinds = TickState(), Diagnosis(), set()
    for snapshot in snapshots(plan("leak-linear", seed=1), every=4.0):
        tick = advance(memory, (), snapshot)
        memory = tick.memory
        replayed = diagnose(replayed, from_json(Snapshot, to_json(snapshot)))
        assert replayed.verdicts == tick.frame.verdicts
        kinds |= {verdict.kind for verdict in replayed.verdicts}
    assert "leak" in kinds


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory of a simulated device that a program with an agent uses."""
    monkeypatch.setenv("GPUMOND_SIM_DIR", str(tmp_path / "cards"))
    card = tmp_path / "cards" / "card0"
    create(card, DeviceSpec(UUID, 0, "Simulated", 24 * GIB, GIB))
    command = [sys.executable, "-m", "gpumond.sim.programs", "training", "--device", str(card), "--speed", "60"]
    running = subprocess.Popen(command, env=os.environ | {"GPUMOND_SOCKET": str(tmp_path / "agent.sock")})
    yield tmp_path
    running.terminate()
    running.wait(60)


def settings_of(directory: Path, socket: str = "agent.sock") -> Settings:
    return Settings(socket=directory / socket, state_dir=directory / "state", interval=0.1)


async def recorded(directory: Path) -> list[Frame]:
    """Return every frame of a daemon, until two kinds of verdicts have occurred."""
    frames: list[Frame] = []
    settings = settings_of(directory)
    with system_dependencies(settings, "sim") as dependencies:
        daemon = Daemon(settings, dependencies, speedup=SPEEDUP)
        end = time.monotonic() + 60
        async with daemon.running():
            while len({verdict.kind for frame in frames for verdict in frame.verdicts}) < 2:
                assert time.monotonic() < end, "there were too few verdicts"
                if await daemon.core.await_frame(1) and daemon.core.frame is not None:
                    frames.append(daemon.core.frame)
    return frames


def onsets(verdicts: list[tuple[Verdict, ...]]) -> list[set[tuple[str, int | None, str]]]:
    """Verdicts that begin with each snapshot."""
    keys = [{(verdict.device_uuid, verdict.pid, verdict.kind) for verdict in each} for each in verdicts]
    return [now - before for before, now in zip([set(), *keys], keys, strict=False)]


def test_recording_of_a_running_daemon_gives_its_verdicts(program: Path):
    frames = asyncio.run(recorded(program))
    assert [frame.snapshot.seq for frame in frames] == list(range(1, len(frames) + 1))
    recording = [to_json(frame.snapshot) for frame in frames]
    diagnosis, replayed = Diagnosis(SPEEDUP), []
    for line in recording:
        diagnosis = diagnose(diagnosis, from_json(Snapshot, line))
        replayed.append(diagnosis.verdicts)
    given = [frame.verdicts for frame in frames]
    assert onsets(replayed) == onsets(given)
    assert replayed == given
    assert any(verdict.pid for verdict in given[-1])


def test_history_of_devices_and_programs_survives_a_restart(program: Path):
    async def closed_blocks(wanted: int, socket: str) -> dict[int | None, tuple[Point, ...]]:
        """Closed blocks of 15 minutes, each of which takes a second of the test."""
        end = time.monotonic() + 60
        settings = settings_of(program, socket)
        with system_dependencies(settings, "sim") as dependencies:
            daemon = Daemon(settings, dependencies, speedup=900.0)
            async with daemon.running():
                while True:
                    assert time.monotonic() < end, "too little was closed_blocks"
                    await asyncio.sleep(0.05)
                    devices = daemon.core.frame.snapshot.devices if daemon.core.frame else ()
                    keys = [None, *(key for device in devices for key in device.processes_by_key)]
                    past = {key: daemon.core.history.series((UUID, key), "used", resolution=900)[:-1] for key in keys}
                    if len(past) == 2 and min(map(len, past.values())) >= wanted:
                        return past

    before, after = asyncio.run(closed_blocks(2, "agent.sock")), asyncio.run(closed_blocks(3, "other.sock"))
    for pid, points in before.items():
        assert [point[1:] for point in after[pid][: len(points)]] == [point[1:] for point in points]
        assert after[pid][0].at == pytest.approx(points[0].at, abs=0.5)
