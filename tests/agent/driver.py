"""Fake for libcuda.so.1, and programs that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.agent_daemon import FAKES, SECONDS, environment

SHOW = """
for p in report():
    held = p.held_bytes if p.held_known else None
    print(p.device_uuid[-1], p.live_bytes, held, p.reclaimable.likely, p.reclaimable.exactness, p.stranded_bytes)
"""
"""Code with which a program prints its pools."""


def build(directory: Path) -> Path:
    """Compile libcuda.so.1 into the directory and return the directory."""
    source, output = os.fspath(FAKES / "libcuda.c"), os.fspath(directory / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", output, source], check=True)
    return directory


def run(code: str, library: Path, gpus: str, **values: str) -> list[str]:
    """Return the output of a program on a machine with these GPUs. Stderr must be empty: the fakes write there
    about each call that initializes a library or creates a context.
    """
    environ = environment("/nowhere", FAKES, LD_LIBRARY_PATH=os.fspath(library), FAKE_CUDA=gpus, **values)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
