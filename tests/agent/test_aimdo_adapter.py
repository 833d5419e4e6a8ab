"""ComfyUI's dynamic VRAM: a fake for comfy-aimdo, and the classes of the real one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.commands.run import INJECT_DIRECTORY, environment
from tests.agent.driver import run as run_program
from tests.helpers.agent_daemon import FAKES, SECONDS

PROGRAM = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_choose()
from comfy_aimdo.model_vbar import ModelVBAR
from comfy_aimdo.vram_buffer import VRAMBuffer
from gpumond.agent import flush, report
import gpumond.agent.allocators.cuda
def show():
    for p in report():
        print(p.allocator, p.device_uuid[-1], p.live_bytes >> 20, p.held_bytes >> 20, p.reclaimable.exactness)
"""


def run(code: str, library: Path, **values: str) -> list[str]:
    metadata = library / "comfy_aimdo-0.6.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: comfy-aimdo\nVersion: 0.6.0\n")
    path = f"{INJECT_DIRECTORY}:{FAKES}:{library}"
    return run_program(PROGRAM + code, library, "cc", **{"GPUMOND_AGENT": "1", "PYTHONPATH": path} | values)


def test_mapped_pages_are_a_pool_on_each_device(library: Path) -> None:
    code = """
show()
one, other, buffer = ModelVBAR(1 << 40, 0), ModelVBAR(1 << 40, 1), VRAMBuffer(1 << 30, 0)
one.fault(3), other.fault(2), buffer.get(16 << 20)
show()
one.fault(1)
print([(r.allocator, r.outcome, r.released_bytes) for r in flush() if r.allocator == "aimdo"])
show()
"""
    assert run(code, library) == [
        "aimdo 0 112 112 not_releasable",
        "aimdo 1 64 64 not_releasable",
        "[('aimdo', 'nothing', 0), ('aimdo', 'nothing', 0)]",
        "aimdo 0 144 144 not_releasable",
        "aimdo 1 64 64 not_releasable",
    ]


def test_objects_end_as_they_would_without_the_agent(library: Path) -> None:
    code = """
from comfy_aimdo.model_vbar import mapped
one, other = ModelVBAR(1 << 40, 0), ModelVBAR(1 << 40, 0)
one.fault(1), other.fault(2)
show()
other.close()
show()
del one
print(mapped, report())
"""
    assert run(code, library) == ["aimdo 0 96 96 not_releasable", "aimdo 0 32 32 not_releasable", "{} ()"]


def test_objects_that_were_not_followed_from_their_beginning_are_not_reported(library: Path) -> None:
    code = "one = ModelVBAR(1 << 40, 0)\none.fault(1)\nprint(report())"
    assert run(code, library, GPUMOND_AGENT="0") == ["()"]


@pytest.mark.skipif(importlib.util.find_spec("comfy_aimdo") is None, reason="needs comfy-aimdo (pip install)")
def test_classes_of_comfy_aimdo_are_followed() -> None:
    code = """
import inspect
from comfy_aimdo import control, model_vbar, vram_buffer
for kind, size in ((model_vbar.ModelVBAR, "loaded_size"), (vram_buffer.VRAMBuffer, "size")):
    source = inspect.getsource(kind)
    print(hasattr(kind.__init__, "gpumond"), "self.device = device" in source, callable(getattr(kind, size)))
    print(list(inspect.signature(kind.__init__).parameters)[:3], hasattr(kind, "__del__"))
"""
    environ = environment(os.environ, None, None)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "True True True",
        "['self', 'size', 'device'] True",
        "True True True",
        "['self', 'max_size', 'device'] True",
    ]
