"""Detection of ranks of a distributed job, and the rate limit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gpumond.agent.program_report import is_distributed, job_name, rank_and_world_size, slurm_account
from gpumond.agent.transport import RateLimit


def unavailable() -> bool:
    raise RuntimeError("not built with it")


def distributed(initialized: Callable[[], bool], size: int) -> dict[str, object]:
    return {"torch.distributed": SimpleNamespace(is_initialized=initialized, get_world_size=lambda: size)}


@pytest.mark.parametrize(
    ("environ", "modules", "expected"),
    [
        ({}, {}, False),
        ({"WORLD_SIZE": "8", "RANK": "0"}, {}, True),
        ({"WORLD_SIZE": "1"}, {}, False),
        ({"WORLD_SIZE": "00"}, {}, False),
        ({"WORLD_SIZE": "many"}, {}, False),
        ({"WORLD_SIZE": ""}, {}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, True),
        ({"SLURM_NTASKS": "16"}, {}, True),
        ({}, distributed(lambda: True, 2), True),
        ({}, distributed(lambda: True, 1), False),
        ({}, distributed(lambda: False, 2), False),
        ({}, distributed(unavailable, 2), False),
        ({}, {"torch.distributed": SimpleNamespace()}, False),
    ],
)
def test_rank_is_detected(environ: dict[str, str], modules: dict[str, object], expected: bool) -> None:
    assert is_distributed(environ, modules) is expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (None, None)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, (0, 16)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, (1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"}, (None, None)),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, (None, None)),
        ({"RANK": "1", "WORLD_SIZE": "99999999"}, (None, None)),
        ({"RANK": "1", "WORLD_SIZE": "9999999"}, (None, None)),
    ],
)
def test_place_is_that_of_the_launcher(environ: dict[str, str], expected: tuple[int | None, int | None]) -> None:
    assert rank_and_world_size(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "a"}, "slurm/4711"),
        ({"RAY_JOB_ID": "02000000"}, "ray/02000000"),
        ({"MASTER_ADDR": "train-master-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "pytorchjob/train"),
        ({"MASTER_ADDR": "train-master-0"}, ""),
        ({"MASTER_ADDR": "10.0.0.7", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ""),
        ({"JOB_COMPLETION_INDEX": "12", "HOSTNAME": "jobset-workers-0-12"}, "job/jobset-workers-0"),
        ({"HOSTNAME": "gpu-12"}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "run 7"}, "torchrun/run_7"),
        ({"GPUMOND_JOB": "team/train-7", "SLURM_JOB_ID": "4711"}, "team/train-7"),
        ({"GPUMOND_JOB": "j" * 200}, "j" * 128),
    ],
)
def test_job_is_that_of_the_launcher(environ: dict[str, str], expected: str) -> None:
    assert job_name(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, ""), ({"SLURM_JOB_ACCOUNT": "physics"}, "physics"), ({"SLURM_JOB_ACCOUNT": "a b"}, "a_b")],
)
def test_account_is_that_of_slurm(environ: dict[str, str], expected: str) -> None:
    assert slurm_account(environ) == expected


def test_rate_limit_allows_a_burst_and_then_one_call_per_period() -> None:
    rate = RateLimit(3, 10.0)
    times = [0, 0, 0, 0, 9, 10, 10, 100, 100, 100, 100]
    assert [rate.allows(now) for now in times] == [True] * 3 + [False] * 2 + [True, False] + [True] * 3 + [False]
