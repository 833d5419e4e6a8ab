"""``gpumond`` and ``python -m gpumond``."""

from __future__ import annotations

import sys

try:
    from gpumond.commands.main import main
except KeyboardInterrupt:  # while Python imports, as later in main()
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
