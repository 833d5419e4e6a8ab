"""Schemathesis run against a real daemon: requests that its OpenAPI document allows, and many that it does not.

It runs as a separate program, because its pytest plug-in is for other uses.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.helpers.running import RunningDaemon, until

MISSING = (
    "needs Python 3.11 or newer, as Schemathesis does"
    if sys.version_info < (3, 11)
    else "needs schemathesis, which the dev extra brings"
    if find_spec("schemathesis") is None
    else ""
)
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "allow_header_conformance",
    "unsupported_method",
)
"""Excludes positive_data_acceptance, because the document cannot express all constraints of a rule."""
ENDLESS = ("/api/v1/events", "/api/v1/live")
LAST = "/api/v1/release"
"""Requested last, because it releases the driver that other requests need."""
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503, 504, 507]

[dictionaries]
pids = {{values = [{pid}]}}
devices = {{values = ["{device}"]}}

[parameters]
"path.pid" = {{dictionary = "pids", probability = 0.5}}
"query.pid" = {{dictionary = "pids", probability = 0.5}}
"query.uuid" = {{dictionary = "devices", probability = 0.5}}
"""
"""All other 5xx are errors of the program; these report a missing external resource."""


@contextmanager
def demo(directory: Path) -> Iterator[RunningDaemon]:
    """Run a daemon with simulated programs, which refuse to record their allocations for minutes."""
    environ = {"GPUMOND_FLUSH_POLICY": "step"}
    with RunningDaemon(directory / "daemon", "--interval", "1s", environ=environ, command="demo") as daemon:
        until(lambda: daemon.request("/-/ready")[0] == 200 and daemon.get("agents"))
        yield daemon


def ask(daemon: RunningDaemon, directory: Path, examples: int, *options: str, seed: int = 1) -> tuple[int, str]:
    """Return exit code and output; the code is 0 if every response was as documented."""
    agent = daemon.get("agents")[0]
    config = directory / "schemathesis.toml"
    config.write_text(CONFIG.format(pid=agent["pid"], device=daemon.get("devices")[0]["uuid"]))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)]
    command += [
        "run",
        f"{daemon.url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        *(part for path in ENDLESS for part in ("--exclude-path", path)),
    ]
    command += ["--max-examples", str(examples), "--seed", str(seed)]
    command += ["--generation-database", "none", "--continue-on-failure", "--request-timeout", "60", "--no-color"]
    command += ["--warnings", "off", *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout + done.stderr


def ask_all(
    daemon: RunningDaemon, directory: Path, examples: int, seed: int = 1, *, without_token: bool = True
) -> None:
    """Run with an administrator's token, and without one. Raises AssertionError with the undocumented responses."""
    token = ("-H", f"Authorization: Bearer {(daemon.directory / 'token').read_text().strip()}")
    runs = ((*token, "--exclude-path", LAST), (*token, "--include-path", LAST))
    for options in ((), *runs) if without_token else runs:
        code, output = ask(daemon, directory, examples, *options, seed=seed)
        assert code == 0, output
    daemon.request("/api/v1/release", {"for_seconds": 0.001}, Authorization=token[1].partition(": ")[2])
    until(lambda: daemon.request("/-/ready")[0] == 200)
    assert "Traceback" not in daemon.log.read_text()
