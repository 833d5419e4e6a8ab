"""Container, pod, unit and job of a process, from /proc/PID/cgroup. Performs no I/O.

Covers cgroup v1, v2 and hybrid; Docker, Podman, containerd, CRI-O and nerdctl with the systemd and the cgroupfs driver;
Kubernetes pods; systemd units; Slurm jobs. Does not cover names of containers and pods (containers.py), and container
managers without 64-digit IDs.

The owner of a cgroup can create cgroups with any name below it. The outermost container therefore counts, and names
below a user's own service manager (``delegated``) prove nothing about other users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_CONTAINER = re.compile(r"(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?")
_MONITOR = "conmon-"
"""Prefix of the scope of a monitor process, which contains the ID of its Podman or CRI-O container."""
_POD = re.compile(
    r"(?:kubepods[a-z-]*-)?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?::.*)?"
)
_JOB = re.compile(r"job_(\d+)")


class ProcessPlacement(NamedTuple):
    container: str | None = None
    pod_uid: str | None = None
    delegated: bool = False
    unit: str | None = None
    slurm_job: str | None = None


def place(text: str) -> ProcessPlacement:
    """Return the placement that /proc/PID/cgroup describes; hierarchies without information are ignored."""
    found = [_walk(path) for path in _paths(text)]
    inside = next((entry for entry in found if entry.container), ProcessPlacement())
    return inside._replace(
        unit=next((entry.unit for entry in found if entry.unit), None),
        slurm_job=next((entry.slurm_job for entry in found if entry.slurm_job), None),
    )


def _paths(text: str) -> list[str]:
    """Return the paths: the unified hierarchy first, then systemd's, then the controllers of version 1."""

    def rank(line: str) -> int:
        return 0 if line.startswith("0::") else 1 if ":name=systemd:" in line else 2

    lines = sorted((line for line in text.splitlines() if line.count(":") >= 2), key=rank)
    return [line.split(":", 2)[2].removesuffix(" (deleted)") for line in lines]


def _walk(path: str) -> ProcessPlacement:
    pod = unit = job = None
    delegated = kubernetes = slurm = False
    for segment in _segments(path):
        kubernetes = kubernetes or segment.startswith("kubepods")
        if kubernetes and (match := _POD.fullmatch(segment)):
            pod = match[1].replace("_", "-")
        if match := _CONTAINER.fullmatch(segment):
            if _MONITOR not in segment:
                return ProcessPlacement(match[1], pod, delegated, unit, job)
        elif slurm and not delegated and (match := _JOB.fullmatch(segment)):
            job = job or match[1]
        slurm = slurm or segment == "slurm" or segment.startswith("slurm_") or segment.endswith("slurmstepd.scope")
        if segment.endswith((".service", ".scope")):
            unit = unit or segment
            delegated = delegated or segment.startswith("user@")
    return ProcessPlacement(None, None, delegated, unit, job)


def _segments(path: str) -> Iterator[str]:
    return (segment for segment in path.split("/") if segment not in ("", ".."))
