"""Driver without a device: a C libcuda.so.1 that suspends the programs of simulated devices.

driver = FakeCuda(tmp_path, build(tmp_path), devices)
subprocess.Popen([...], env={**os.environ, **driver.env})
driver.fail("checkpoint", "before", "801")
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

STATES = ("running", "locked", "checkpointed", "failed")


def build(directory: Path) -> Path:
    """Compile the library into ``directory`` and return its path; requires ``cc``."""
    library = directory / "libcuda.so.1"
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-format-truncation", "-Werror"]
    source = str(Path(__file__).with_name("cuda.c"))
    subprocess.run(["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", *warnings, "-o", str(library), source], check=True)
    return library


class FakeCuda:
    """``devices``: the directory of the simulated devices."""

    def __init__(self, directory: Path, library: Path, devices: Path) -> None:
        self.directory = directory / "fakecuda"
        (self.directory / "states").mkdir(parents=True)
        self.directory.chmod(0o777)
        (self.directory / "states").chmod(0o777)
        path = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")]))
        self.env = {"LD_LIBRARY_PATH": path, "FAKECUDA_DIR": str(self.directory), "GPUMOND_SIM_DIR": str(devices)}

    def fail(self, function: str, place: str, action: str) -> None:
        """Add a fault, which occurs once: see cuda.c."""
        with (self.directory / "faults").open("a") as file:
            file.write(f"{function} {place} {action}\n")

    def heal(self) -> None:
        """Remove the faults that have not occurred."""
        (self.directory / "faults").unlink(missing_ok=True)

    def state(self, pid: int) -> str:
        try:
            return STATES[int((self.directory / "states" / str(pid)).read_text())]
        except FileNotFoundError:
            return "running"

    def calls(self) -> list[str]:
        """Return the calls that change something, each with its result."""
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []
