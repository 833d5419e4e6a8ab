"""Functions that the agent must not call, since they initialize a library or create a context. A call is reported on
stderr.
"""

from __future__ import annotations

import sys
from typing import Any


def forbidden(name: str) -> Any:
    def call(*_: object, **__: object) -> None:
        sys.stderr.write(f"the agent must not use {name}\n")

    return call
