"""Detection of distributed jobs, whose ranks must not be stalled at the same time."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables with the number of ranks, as torchrun, Open MPI, MPICH and Slurm set them."""


def is_rank(environ: Mapping[str, str] = os.environ, modules: Mapping[str, Any] = sys.modules) -> bool:
    """Return whether the program is one of several ranks, by the launcher's environment or torch.distributed."""
    if any(_more_than_one(environ.get(name, "")) for name in SIZES):
        return True
    distributed = modules.get("torch.distributed")
    try:
        return bool(distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1)
    except Exception:  # a build without it, or an incomplete set-up
        return False


def _more_than_one(size: str) -> bool:
    return size.isdecimal() and size != "1" and size.strip("0") != ""
