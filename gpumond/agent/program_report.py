"""The program's part of a report: scopes, steps, out-of-memory errors, and whether it is a rank of a job.

The module of scopes is not loaded in a program that has none.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumond.agent.measure.oom_record import OOMS
from gpumond.agent.measure.steps import STEPS, usage_by_device
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import EMPTY_PROGRAM, MAX_RANKS, Program, Retainer

if TYPE_CHECKING:
    from gpumond.agent.measure.scopes import Scopes


def record_pools(pools: Sequence[PoolUsage], is_final: bool = False) -> None:
    """Update open scopes and the out-of-memory errors with the pools that a report has read.

    ``is_final``: no report follows.
    """
    scopes = _scopes()
    if scopes is not None and scopes.has_open_entries:
        scopes.sample(usage_by_device(pools))
    OOMS.record_counters(pools, is_final)


def program_report(distributed: bool, refusals: int = 0, retainers: tuple[Retainer, ...] = ()) -> Program:
    """Return the report. ``distributed``: a rank of a job. ``refusals``: refused commands and messages."""
    scopes, steps = _scopes(), STEPS.usage()
    if not (scopes or steps or OOMS.has_records or distributed or refusals or retainers):
        return EMPTY_PROGRAM
    return Program(
        scopes=scopes.usage() if scopes else (),
        step=steps,
        ooms=OOMS.recent(),
        oom_retries=OOMS.report_retries(),
        oom_recovered=OOMS.recoveries,
        distributed=distributed,
        refusals=refusals,
        retainers=retainers,
    )


def _scopes() -> Scopes | None:
    # The program may be importing the module in another thread: it then has no such attribute yet.
    return getattr(sys.modules.get("gpumond.agent.measure.scopes"), "SCOPE_TOTALS", None)


RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables with the rank and the number of ranks, as torchrun, Open MPI, MPICH and Slurm set them."""


def is_distributed(environ: Mapping[str, str] = os.environ, modules: Mapping[str, Any] = sys.modules) -> bool:
    """Return whether the program is one of several ranks, by the launcher's environment or torch.distributed."""
    sizes = (environ.get(size, "") for _, size in RANK_VARIABLES)
    if any(size.isdecimal() and size != "1" and size.strip("0") for size in sizes):
        return True
    return _query_torch_distributed(modules, lambda distributed: distributed.get_world_size() > 1)


def components(modules: Mapping[str, Any] = sys.modules) -> tuple[str, ...]:
    """Return what takes device memory outside of the pools or shares it, as far as it is visible without a call of
    CUDA.
    """
    presence = {
        "nccl": _query_torch_distributed(modules, lambda distributed: "nccl" in str(distributed.get_backend())),
        "graphs": getattr(modules.get("gpumond.agent.allocators.cuda"), "CAPTURED_GRAPHS", None),
        "triton": "triton" in modules,
        "ipc": _shares_memory(modules.get("torch.multiprocessing.reductions")),
    }
    return tuple(name for name, is_present in presence.items() if is_present)


def _query_torch_distributed(modules: Mapping[str, Any], read: Callable[[Any], bool]) -> bool:
    """Return a property of torch.distributed; False while it is not initialized."""
    distributed = modules.get("torch.distributed")
    try:
        return bool(distributed is not None and distributed.is_initialized() and read(distributed))
    except Exception:  # a build without it, or an incomplete set-up
        return False


def _shares_memory(reductions: Any) -> bool:
    """Return whether PyTorch shares memory of a device. The keys of host memory are numbers or names of files."""
    try:
        for key, storage in list(getattr(reductions, "shared_cache", {}).items()):
            handle = key[0] if isinstance(key, tuple) else key
            if isinstance(handle, bytes) and not handle.startswith(b"/torch") and not storage.expired():
                return True
    except Exception:  # a version that is not understood
        pass
    return False


def rank_and_world_size(environ: Mapping[str, str] = os.environ) -> tuple[int | None, int | None]:
    """Return rank and number of ranks that the launcher states, or twice None without several ranks."""
    for names in RANK_VARIABLES:
        texts = [environ.get(name, "") for name in names]
        if all(text.isdecimal() and len(text) < 8 for text in texts):
            rank, size = map(int, texts)
            if rank < size and 1 < size <= MAX_RANKS:
                return rank, size
    return None, None


MAX_JOB_CHARACTERS = 128
_INDEXED_POD = re.compile(r"(.+)-\d+")
_PYTORCHJOB_MASTER = re.compile(r"([^.]+)-master-0(\..*)?")
"""Addresses of the first pod of a PyTorchJob of Kubeflow."""


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the identity of the job that the program belongs to, on all its machines; empty without one.

    It is $GPUMOND_JOB, else that of Slurm, Ray, Kubeflow's PyTorchJob, an indexed Job of Kubernetes or torchrun, after
    the name of the system.
    """
    if environ.get("GPUMOND_JOB"):
        return _protocol_name(environ["GPUMOND_JOB"])
    master = _PYTORCHJOB_MASTER.fullmatch(environ.get("MASTER_ADDR", ""))
    pod = _INDEXED_POD.fullmatch(environ.get("HOSTNAME", "")) if environ.get("JOB_COMPLETION_INDEX") else None
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    names = {
        "slurm": environ.get("SLURM_JOB_ID", ""),
        "ray": environ.get("RAY_JOB_ID", ""),
        "pytorchjob": master[1] if master and environ.get("KUBERNETES_SERVICE_HOST") else "",
        "job": pod[1] if pod else "",
        "torchrun": "" if run == "none" else run,
    }
    return next((_protocol_name(f"{system}/{name}") for system, name in names.items() if name), "")


def slurm_account(environ: Mapping[str, str] = os.environ) -> str:
    """Return the account to which Slurm charges the job, or an empty text."""
    return _protocol_name(environ.get("SLURM_JOB_ACCOUNT", ""))


def _protocol_name(text: str) -> str:
    """Return a name as the protocol allows it."""
    return re.sub(r"[^A-Za-z0-9._/-]", "_", text)[:MAX_JOB_CHARACTERS]
