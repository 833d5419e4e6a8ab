"""Queries in the metrics' documentation, evaluated by Prometheus' own engine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
TARGET = 'instance="a:9917",job="gpumond"'
POD = 'comm="python",user="ml",workload="train",container="0f",container_name="main",pod_uid="2c48913c",unit=""'
SERIES = {
    f'gpumond_process_memory_used_bytes{{{TARGET},gpu="0",uuid="GPU-a",pid="10"}}': 4,
    f'gpumond_process_memory_used_bytes{{{TARGET},gpu="1",uuid="GPU-b",pid="10"}}': 5,
    f'gpumond_process_memory_used_bytes{{{TARGET},gpu="0",uuid="GPU-a",pid="11"}}': 100,
    f'gpumond_process_info{{{TARGET},pid="10",{POD},pod_name="train-0",pod_namespace="research"}}': 1,
    f'gpumond_process_info{{{TARGET},pid="11",comm="python",user="ml"}}': 1,
    'kube_pod_labels{job="ksm",instance="k:8080",namespace="research",pod="train-0",uid="2c",label_team="vision"}': 1,
    'kube_pod_labels{job="ksm",instance="k:8080",namespace="other",pod="train-0",uid="3d",label_team="speech"}': 1,
}


@pytest.mark.needs("promtool")
def test_documented_query_gives_the_value(tmp_path: Path):
    (query,) = re.findall(r"```promql\n(sum by \(label_team\).*?)```", DOCUMENT.read_text(), re.DOTALL)
    inputs = [{"series": name, "values": str(values)} for name, values in SERIES.items()]
    checks = [{"expr": query, "eval_time": "0s", "exp_samples": [{"labels": '{label_team="vision"}', "value": 9}]}]
    file = tmp_path / "joins.test.yaml"
    file.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": checks}]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
