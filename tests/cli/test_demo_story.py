"""Captions of the demo: each is true of the daemon, and says what to try."""

from __future__ import annotations

from typing import Any

from gpumond.commands.demo import captions
from gpumond.facts.units import GIB

EMPTY: dict[str, Any] = {
    "queue": [],
    "processes": [],
    "verdicts": [],
    "alerts": [],
    "snapshot": {"suspended_programs": [], "reports": []},
}


def told(**fields: Any) -> dict[str, str]:
    receipts = fields.pop("receipts", [])
    return dict(captions(EMPTY | fields, receipts))


def test_nothing_is_told_of_an_empty_machine():
    assert told() == {}


def test_captions_contain_the_figures_of_the_daemon():
    training = {"pid": 1, "workload": "train-llm", "cached_bytes": 3 * GIB, "live_bytes": 2 * GIB, "quota": None}
    idle = {"pid": 3, "workload": "embeddings", "cached_bytes": 0, "live_bytes": 9 * GIB, "quota": None}
    held = {"kind": "idle-holder", "pid": 3, "summary": "embeddings uses 9.2 GiB and has been idle for 90 s"}
    suspended = {"state": "suspended", "workload": "embeddings", "memory": [{"used_bytes": 10 * GIB}]}
    notebook = {"pid": 2, "workload": "notebook", "cached_bytes": 0, "live_bytes": GIB, "quota": None}
    quota = {"quota": {"soft_limit_bytes": 2 * GIB}, "used_bytes": 3 * GIB}
    limited = {"workload": "chat-api", "limits": [{}], "program": {"oom_recovered": 2}}
    serving = {"pid": 5, "workload": "chat-api", "cached_bytes": 0, "live_bytes": GIB} | quota
    verdict = {"kind": "leak", "pid": 2, "summary": "notebook grows by 840.0 MiB/min"}
    alert = {"labels": [["workload", "finetune"], ["gpu", "1"]], "annotations": [["case", "c1"]]}
    receipt = {"outcome": "freed", "released_bytes": GIB, "workload": "etl", "requested_by": "rule:flush"}
    receipt |= {"requested_for": ""}
    moved = {"workload": "embeddings", "requested_for": "pretrain (pid 4)", "requested_by": "token@uid:0"}
    back = {"workload": "embeddings", "requested_by": "SIGCONT", "duration_seconds": 28.0}
    found = told(
        queue=[{"need_bytes": 20 * GIB, "workload": "pretrain"}],
        processes=[training, notebook, idle, serving],
        snapshot={"suspended_programs": [suspended], "reports": [limited]},
        verdicts=[verdict, held],
        alerts=[alert],
        receipts=[receipt, moved | {"outcome": "suspended"}, back | {"outcome": "resumed"}],
    )
    assert found == {
        "queue": "pretrain is waiting for 20.0 GiB on a GPU. See: gpumond queue",
        "cache": "train-llm keeps 3.0 GiB in its cache, which a flush would release. Try: gpumond flush train-llm",
        "idle": "embeddings uses 9.2 GiB and has been idle for 90 s. To move its memory to the host: gpumond suspend "
        "embeddings",
        "quota": "chat-api uses 1.0 GiB more than the soft limit of its quota (2.0 GiB). See: gpumond quota",
        "limit": "chat-api reached its limit, aborted requests and kept running. See: gpumond oom list",
        "suspended": "embeddings is suspended. To resume, it needs 10.0 GiB. Try: gpumond resume embeddings --wait 2m",
        "leak": "notebook grows by 840.0 MiB/min. Try: gpumond why notebook",
        "share": "embeddings was idle, and gpumond suspended it for pretrain (pid 4)",
        "back": "The user of embeddings is back, and gpumond resumed it after 28 s. See: gpumond receipts",
        "flush": "A flush of etl, requested by rule flush, released 1.0 GiB. See: gpumond receipts",
        "oom of finetune": "finetune had an out-of-memory error on GPU 1. See: gpumond oom show c1",
    }


def test_small_caches_short_pauses_and_healthy_verdicts_are_not_told():
    training = {"pid": 1, "workload": "train-llm", "cached_bytes": GIB, "live_bytes": None, "quota": None}
    idle = training | {"pid": 3, "workload": "embeddings", "cached_bytes": 0, "idle_seconds": 60.0}
    assert told(processes=[training, idle], verdicts=[{"kind": "churn", "summary": ""}]) == {}
