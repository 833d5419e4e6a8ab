"""Starts the agent in the programs of this environment that run with ``GPUMOND_AGENT=1``.

The line in ``gpumond.pth``, which the wheel puts beside the package, calls it for those alone: every other program
pays some microseconds for the question. An entry point in a ``.start`` file, which Python has from 3.15 on, would
cost each of them milliseconds; lines in a ``.pth`` file work there too.
"""

from __future__ import annotations

import os
import sys

WORDS = 16
"""So many words of the command line are searched for the path of the program."""


def start() -> None:
    """Start the agent, unless the program has a module of its own of the name gpumond. Raises nothing."""
    try:
        if _has_own_gpumond(sys.orig_argv[1:WORDS]):
            for name in [name for name in sys.modules if name.partition(".")[0] == "gpumond"]:
                del sys.modules[name]
            return
        import gpumond.agent

        gpumond.agent.start()
    except Exception:  # whatever happens to the agent
        pass


def _has_own_gpumond(words: list[str]) -> bool:
    """Return whether ``gpumond.py`` is in the working directory or in that of a file which the command line names.

    Python adds the directory of the program to its path only after the agent's start.
    """
    return any(os.path.exists(os.path.join(os.path.dirname(word), "gpumond.py")) for word in words)
