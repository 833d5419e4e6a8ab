from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "load.md"


def test_the_document_shows_the_list_as_it_is():
    listed = subprocess.run(
        [sys.executable, "-m", "gpumond", "load", "--list"], capture_output=True, text=True, check=True, timeout=60
    )
    assert listed.stdout in DOCUMENT.read_text()
