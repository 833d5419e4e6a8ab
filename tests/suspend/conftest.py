"""Simulated devices whose programs a fake libcuda suspends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpumond.sim.device import MIB, DeviceSpec, SimDevice, create
from tests.fakecuda import FakeCuda, build
from tests.helpers.running import RunningDaemon, until

OPTIONS = ("--source", "sim", "--interval", "0.2s")
ALLOWED = {"GPUMOND_ALLOW_SUSPEND": "true", "GPUMOND_SUSPEND_AFTER_IDLE": "0s"}


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fakecuda"))


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    """A device of 1 GiB."""
    return create(
        tmp_path / "devices" / "card", DeviceSpec("GPU-simulated", 0, "sim", 1024 * MIB, context_bytes=24 * MIB)
    )


@pytest.fixture
def cuda(cuda_library: Path, tmp_path: Path, device: SimDevice) -> Iterator[FakeCuda]:
    """Helpers that hang are killed at the end."""
    yield FakeCuda(tmp_path, cuda_library, device.directory.parent)
    mark = f"FAKECUDA_DIR={tmp_path / 'fakecuda'}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environ = (directory / "environ").read_bytes().split(b"\0")
            if (
                mark in environ
                and b"gpumond.features.suspend.checkpoint_process" in (directory / "cmdline").read_bytes()
            ):
                os.kill(int(directory.name), signal.SIGKILL)


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], cuda: FakeCuda) -> RunningDaemon:
    return ready(serve(*OPTIONS, environ=cuda.env | ALLOWED))


def ready(daemon: RunningDaemon) -> RunningDaemon:
    until(lambda: daemon.request("/api/v1/frame")[0] == 200)
    return daemon
