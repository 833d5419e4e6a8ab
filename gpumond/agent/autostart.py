"""Starts the agent in the programs of this environment that run with ``GPUMOND_AGENT=1``.

Two files that the wheel installs next to the package call it for these programs only: the line in ``gpumond.pth``,
which costs any other program some microseconds, and from Python 3.15 on the entry point in ``gpumond.start``
(PEP 829).
"""

from __future__ import annotations

import os
import sys

WORDS = 16
"""Number of words of the command line that are searched for the path of the program."""


def start() -> None:
    """Start the agent, unless the program has a module of its own named gpumond. Never raises."""
    try:
        if _has_own_gpumond(sys.orig_argv[1:WORDS]):
            for name in [name for name in sys.modules if name.partition(".")[0] == "gpumond"]:
                del sys.modules[name]
            return
        import gpumond.agent

        gpumond.agent.start()
    except Exception:  # an error of the agent must not reach the program
        pass


def _has_own_gpumond(words: list[str]) -> bool:
    """Return whether ``gpumond.py`` is in the working directory or next to a file that the command line names.

    Python adds the directory of the program to its path only after the agent's start.
    """
    return any(os.path.exists(os.path.join(os.path.dirname(word), "gpumond.py")) for word in words)
