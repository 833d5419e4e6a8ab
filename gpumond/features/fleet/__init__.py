"""Several machines: find their daemons, read their frames, and flush programs on them."""

from __future__ import annotations

from gpumond.feature import Command, Feature

FEATURE = Feature(
    __name__,
    commands=(
        Command(
            "fleet",
            "Machines",
            "show GPUs and flush programs on all your machines",
            (
                "gpumond fleet targets --kubernetes --json",
                "gpumond fleet status --targets gpus.json --scheme https",
                "gpumond fleet status --targets gpus.json --problems --label zone=eu-1",
                "gpumond fleet status --slurm --drift",
                "gpumond fleet top --slurm --machine 'gpu-1*'",
                "gpumond fleet doctor --slurm --machine 'gpu-*'",
                "gpumond fleet flush --targets gpus.json --workload 'train-*' --dry-run",
                "gpumond fleet flush --prometheus http://prom:9090 --query 'gpumond_pool_reclaimable_bytes > 2e9'",
                "gpumond fleet sleep --targets gpus.json --engine 'chat-*'",
                "gpumond fleet wake --targets gpus.json --engine 'chat-*'",
                "gpumond fleet audit --targets gpus.json --operation 20261126-091246-3fa9c1",
                "gpumond fleet undo --targets gpus.json 20261126-091246-3fa9c1 --dry-run",
                "gpumond fleet report --prometheus http://127.0.0.1:9090 --from 2026-11-01 --html report.html",
                "gpumond fleet advise --prometheus http://127.0.0.1:9090 --for 14d --by user,workload",
            ),
        ),
    ),
)
