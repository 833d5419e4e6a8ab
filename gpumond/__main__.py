"""``gpumond`` and ``python -m gpumond``."""

from __future__ import annotations

import os
import signal
import sys

handler = signal.getsignal(signal.SIGINT)
if handler is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # imports make other exceptions of KeyboardInterrupt
try:
    from gpumond.commands.main import main
finally:
    signal.signal(signal.SIGINT, handler)

if __name__ == "__main__":
    sys.exit(main())
