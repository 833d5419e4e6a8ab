from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "loadgen.md"


def test_document_contains_the_current_list():
    listed = subprocess.run(
        [sys.executable, "-m", "gpumond", "loadgen", "--list"], capture_output=True, text=True, check=True, timeout=60
    )
    assert listed.stdout in DOCUMENT.read_text()
