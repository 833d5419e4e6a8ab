"""On a real device: each scenario of the load generator once, with either backend: used memory, and its release."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.result import publish
from gpumond.features.loadgen.plan import SCENARIOS

BACKENDS = ("cupy", "torch")
OPTIONS = ("--max", "8GiB", "--duration", "4s", "--speed", "3000", "--json")
MIB = 1 << 20


def main() -> None:
    figures: dict[str, object] = {}
    for number, name in enumerate(SCENARIOS):
        backend = BACKENDS[number % 2]
        before = used()
        command = [sys.executable, "-m", "gpumond", "loadgen", name, "--backend", backend, *OPTIONS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            figures[f"{name} {backend}"] = {"refused": done.stderr.strip()[-300:]}
            continue
        account = json.loads(done.stdout)
        fields = {key: account.get(key) for key in ("outcome", "takes", "peak_held_bytes", "lives")}
        figures[f"{name} {backend}"] = {**fields, "left_mib": (used() - before) // MIB}
    publish("gpu_load", figures)


def used() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * MIB


if __name__ == "__main__":
    main()
