"""Strict validation of resources with the schemas of the Prometheus operator."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.machine import ROOT

GROUP = "monitoring.coreos.com/"
PACKAGES = ROOT / "build" / "crds"
PROGRAM = Path(__file__).with_suffix(".mjs")
SCHEMAS = PACKAGES / "node_modules" / "@kubernetes-models" / "prometheus-operator" / "_schemas"
REASON = (
    ""
    if shutil.which("node") and SCHEMAS.is_dir()
    else "needs node, and @kubernetes-models/prometheus-operator in build/crds (see .ci/run)"
)
"""Reason why this machine cannot validate them; empty if it can."""


def errors_of(objects: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the errors of each object, and its null or unknown fields."""
    command = ["node", str(PROGRAM), str(PACKAGES)]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer: list[list[str]] = json.loads(done.stdout)
    return answer
