"""Commands that run code of this package in a process of its own. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])


def code_command(code: str) -> tuple[str, str, str]:
    """Return the start of a command that runs code, which may import gpumond.

    Unlike ``python -c`` and ``-m``, it imports nothing from the current directory: a file there may have a library's
    name, such as ``csv.py``.
    """
    return sys.executable, "-c", f"import sys; sys.path[:] = [*filter(None, sys.path), {_ROOT!r}]; {code}"


def module_command(name: str) -> tuple[str, str, str]:
    """Return the start of a command that runs a module of gpumond."""
    return code_command(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)")
