"""A daemon that reads devices and answers Prometheus imports neither FastAPI nor pydantic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fakenvml import FakeDriver, machine
from tests.running import RunningDaemon, until

CONFIGURATION = """
disabled_rules: [idle-holder]
rule_overrides: {xid-errors: {severity: info}}
rules:
  - {name: any-memory, scope: device, value: used_bytes, above: 0, annotations: {summary: "{used} used"}}
quotas:
  - {name: all, match: {workload: "*"}, soft: 40GiB}
receivers:
  - {name: own, type: log}
"""


def imports_pydantic(daemon: RunningDaemon) -> bool:
    return "_pydantic_core" in Path(f"/proc/{daemon.process.pid}/maps").read_text()


def test_daemon_imports_pydantic_when_the_api_needs_it(
    serve: Callable[..., RunningDaemon], driver: FakeDriver, tmp_path: Path
):
    driver.devices = machine(2)
    driver.write()
    file = tmp_path / "gpumond.yaml"
    file.write_text(CONFIGURATION)
    daemon = serve("--source", "nvml", "--config", str(file), environ=driver.env)
    until(lambda: daemon.value("gpumond_device_up", gpu="1"))
    until(lambda: "alert any-memory fires" in daemon.log.read_text())
    assert not imports_pydantic(daemon)
    assert len(daemon.get("quotas")) == 1
    assert imports_pydantic(daemon)
