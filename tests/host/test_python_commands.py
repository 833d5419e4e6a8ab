"""Code of gpumond in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from gpumond.host.python_commands import module_command


def test_file_of_the_current_directory_replaces_no_library(tmp_path: Path):
    for name in ("csv", "gpumond"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    order = json.dumps({"action": "settle", "pid": 1, "start_ticks": 0, "uid": 0})
    command = [*module_command("gpumond.features.suspend.checkpoint_process"), order]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stderr, json.loads(done.stdout)["state"]) == ("", "gone")
