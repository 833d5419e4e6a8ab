"""The stand-in for libcuda.so.1, and programs that run beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.agent.daemon import SECONDS, STANDINS, environment


def build(directory: Path) -> Path | None:
    """The directory, with libcuda.so.1 in it; None without a C compiler."""
    if shutil.which("cc") is None:
        return None
    source, output = os.fspath(STANDINS / "libcuda.c"), os.fspath(directory / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", output, source], check=True)
    return directory


def run(code: str, library: Path, gpus: str, **values: str) -> list[str]:
    """What a program prints on a machine with such GPUs, without a word on stderr.

    The stand-ins complain there of every call that would initialise something or make a context.
    """
    environ = environment("/nowhere", STANDINS, LD_LIBRARY_PATH=os.fspath(library), FAKE_CUDA=gpus, **values)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
