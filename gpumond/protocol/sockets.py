"""Default paths of the agents' socket."""

from __future__ import annotations

import os
from collections.abc import Mapping

SERVICE_SOCKET = "/run/gpumond/agent.sock"


def default_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the default path of the socket; None if the user has no directory of its own."""
    return SERVICE_SOCKET if os.geteuid() == 0 else own_socket(environ)


def own_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a daemon for this user alone: in the runtime directory or, without one, below the home."""
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "gpumond", "agent.sock")
    home = environ.get("HOME")
    return os.path.join(home, ".local", "state", "gpumond", "agent.sock") if home else None
