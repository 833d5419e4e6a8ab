"""Modules of the page without I/O, run by node."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gpumond.page.files import MODULES

NODE = shutil.which("node")
needs_node = pytest.mark.needs("node")
SECONDS = 120


def run_module(name: str, expression: str, *arguments: Any) -> Any:
    """Return the value of an expression, in which ``m`` is the module and ``given`` the list of arguments."""
    script = (
        f'import * as m from "{Path(_directory().name).as_uri()}/{name}.js"; import {{ readFileSync }} from "node:fs";'
        f"const given = JSON.parse(readFileSync(0));"
        f"process.stdout.write(JSON.stringify({expression}) ?? 'null');"
    )
    assert NODE
    done = subprocess.run(
        [NODE, "--input-type=module", "--eval", script],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def _directory() -> TemporaryDirectory[str]:
    directory = TemporaryDirectory(prefix="gpumond-page-modules-")
    (Path(directory.name) / "package.json").write_text('{"type": "module"}')
    for name, text in MODULES.items():
        (Path(directory.name) / f"{name}.js").write_text(text)
    return directory
