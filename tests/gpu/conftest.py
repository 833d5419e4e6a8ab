from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.helpers.running import RunningDaemon, until


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon]) -> RunningDaemon:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs an NVIDIA device")
    started: RunningDaemon = serve("--source", "nvml")
    until(lambda: started.request("/-/ready")[0] == 200, 60)
    return started
