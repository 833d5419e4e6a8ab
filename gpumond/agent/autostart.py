"""Starts the agent in the programs of this environment that run with ``GPUMOND_AGENT=1``.

Two files that the wheel installs next to the package call it for these programs only: the line in ``gpumond.pth``,
which costs any other program some microseconds, and from Python 3.15 on the entry point in ``gpumond.start``
(PEP 829).
"""

from __future__ import annotations

import os
import sys

MAX_SEARCHED_WORDS = 16
"""Number of words of the command line that are searched for the path of the program."""


def start() -> None:
    """Start the agent, unless the program has a module or package of its own named gpumond. Never raises."""
    try:
        if _has_own_gpumond(sys.orig_argv[1:MAX_SEARCHED_WORDS]):
            for name in [name for name in sys.modules if name.partition(".")[0] == "gpumond"]:
                del sys.modules[name]
            return
        import gpumond.agent

        gpumond.agent.start()
        from gpumond.agent.imports import when_imported

        if os.environ.get("GPUMOND_COUNT_RMM") != "0":
            when_imported("rmm", _count_rmm)
        for name in ("comfy_aimdo.model_vbar", "comfy_aimdo.vram_buffer"):
            when_imported(name, _track_aimdo)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an error of the agent, or SystemExit of a module that it imports, is not the program's
        pass


def _count_rmm(rmm: object) -> None:
    from gpumond.agent.allocators.rmm import start_counting

    start_counting(rmm)


def _track_aimdo(module: object) -> None:
    from gpumond.agent.allocators.aimdo import track

    track(module)


def _has_own_gpumond(words: list[str]) -> bool:
    """Return whether ``gpumond.py``, or another package of this name, is in the working directory or next to a file
    that the command line names.

    Python adds the directory of the program to its path only after the agent's start.
    """
    package = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "__init__.py"))
    for directory in map(os.path.dirname, words):
        other = os.path.join(directory, "gpumond", "__init__.py")
        if os.path.exists(os.path.join(directory, "gpumond.py")):
            return True
        if os.path.exists(other) and os.path.realpath(other) != package:
            return True
    return False
