"""Starts the agent in the programs of this environment that run with ``GPUMOND_AGENT=1``.

The line in ``gpumond.pth``, which the wheel puts beside the package, calls it for those alone: every other program
pays some microseconds for the question. An entry point in a ``.start`` file, which Python has from 3.15 on, would
cost each of them milliseconds; lines in a ``.pth`` file work there too.
"""

from __future__ import annotations


def start() -> None:
    """Never keeps a program from starting."""
    try:
        import gpumond.agent

        gpumond.agent.start()
    except Exception:  # whatever happens to the agent
        pass
