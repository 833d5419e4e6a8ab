"""``gpumond`` and ``python -m gpumond``."""

from __future__ import annotations

import sys

from gpumond.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
