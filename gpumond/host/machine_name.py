"""Name of this machine."""

from __future__ import annotations

import os
import socket

MACHINE_NAME = os.environ.get("NODE_NAME") or socket.gethostname()
"""In a pod, the name of its node: there, the kernel returns the pod's name."""
