from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.driver import build
from tests.helpers.agent_daemon import FakeDaemon
from tests.helpers.simulated import allocator

__all__ = ["allocator"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path / "agent.sock")
    yield daemon
    daemon.close()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory that contains the fake for libcuda.so.1."""
    return build(tmp_path_factory.mktemp("libcuda"))
