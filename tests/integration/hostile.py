"""Program on a simulated device whose name contains markup and control characters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumond.sim.device import MIB, SimDevice

NAME = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
COMM = "<b>\x1b[2J\u202e%s"
"""The kernel keeps 15 bytes."""

LONG = f"{NAME}\x1b[31m\u202egnp.exe\u2066\u200f{'W' * 4096}"


@contextmanager
def holding(device: Path) -> Iterator[None]:
    """Run the program until the block ends."""
    command = [sys.executable, "-m", "tests.integration.hostile", str(device)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout
    assert program.stdin
    assert program.stdout.readline() == b"held\n"
    try:
        yield
    finally:
        program.stdin.close()
        program.wait(60)
        program.stdout.close()


def main() -> None:
    Path("/proc/self/comm").write_text(COMM)
    context = SimDevice(sys.argv[1]).attach()
    context.allocate(512 * MIB)
    sys.stdout.write("held\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
