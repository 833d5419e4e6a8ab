"""Output of figures: they are printed, and stored with the date, the machine and the versions."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
LIBRARIES = (
    "nvidia-ml-py",
    "prometheus-client",
    "fastapi",
    "uvicorn",
    "httptools",
    "pydantic",
    "torch",
    "cupy-cuda13x",
)


def publish(name: str, figures: dict[str, object]) -> None:
    result = {"bench": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), "figures": figures}
    print(json.dumps(result, indent=2))
    if "--save" in sys.argv:
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def machine() -> dict[str, object]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": versions,
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, p99 and maximum in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[math.ceil(len(ordered) * 0.99) - 1] * 1e3, 3),
        "max_ms": round(ordered[-1] * 1e3, 3),
        "n": len(ordered),
    }
