from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.daemon import Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "agent.sock")
    yield daemon
    daemon.close()
