"""Registration with PyTorch: when it is imported, before and after the model, in forks, and with errors."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.commands.run import environment as run_environment
from tests.helpers.agent_daemon import SECONDS, environment

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

MEASURE = """
import gc, sys, time, warnings
warnings.simplefilter("ignore")
def model():
    import torch
    made = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    return made, optimizer
def measured(search=0.0):
    import torch
    from gpumond.agent.allocators import torch_live_classes
    found = torch_live_classes.measure_classes(torch, "cpu", search)
    return list(found.get(0, found[torch_live_classes.ANY_OTHER_DEVICE]))
"""
SIZE = 8 * (64 * 64 + 64) * 4
TRAINED = [SIZE, SIZE, 2 * SIZE + 16 * 4, 0]
"""Bytes of parameters, gradients, optimizer state (with a counter of steps for each parameter), and buffers."""


def run(code: str, environ: dict[str, str] | None = None) -> list[str]:
    """Run a program, and return its lines."""
    environ = environ or environment("/nowhere")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + code], env=environ, capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@needs_torch
def test_program_that_starts_with_the_agent_has_its_classes_at_once():
    """Its child knows these and its own."""
    code = "kept = model(); print(measured())"
    assert run(code, run_environment(environment("/nowhere"), None, None)) == [str([*TRAINED, None])]
    code = """
import gpumond.agent, os
gpumond.agent.start()
kept = model()
child = os.fork()
if not child:
    import torch
    own = torch.nn.Linear(10, 10)
    print(measured(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(measured())
"""
    assert run(code) == [str([SIZE + 440, *TRAINED[1:], None]), str([*TRAINED, None])]


@needs_torch
def test_agent_that_starts_after_the_model_shows_no_class_before_a_search():
    """Each case is a fork of a program that has imported PyTorch: the agent's own search, that of someone who asks,
    which distinguishes other tensors, and that of a build for devices only.
    """
    code = """
import os, torch, torch._dynamo
if not os.fork():
    kept = model()
    from gpumond.agent.allocators.torch_objects import TORCH_OBJECTS
    TORCH_OBJECTS.install()
    newer = model()
    print(measured())
    from gpumond.agent.allocators import torch_live_classes
    torch_live_classes.search_heap(torch, 0.0)
    print(measured())
    torch_live_classes.search_heap(torch)
    print(measured())
    del newer
    gc.collect()
    print(measured())
    sys.exit()
os.wait()
if not os.fork():
    kept, other = model(), torch.ones(1000)
    print(measured(600.0))
    sys.exit()
os.wait()
kept = model()
from gpumond.agent.allocators.torch import TorchAdapter
from gpumond.agent.allocators.torch_objects import TORCH_OBJECTS
adapter = TorchAdapter(torch)
adapter.find_older_objects()
print(TORCH_OBJECTS.needs_search, TORCH_OBJECTS.is_complete)
torch.version.cuda = "13.0"
adapter.find_older_objects()
print(TORCH_OBJECTS.needs_search, TORCH_OBJECTS.is_complete)
"""
    both = [2 * size for size in TRAINED]
    *own, asked, before, after = run(code)
    assert own == [str(line) for line in ([None] * 5, [None] * 5, [*both, None], [*TRAINED, None])]
    *registered, tensors = map(int, asked.strip("[]").split(","))
    assert registered == TRAINED
    assert tensors >= 4000
    assert (before, after) == ("True False", "False True")


@needs_torch
def test_pytorch_is_imported_as_without_the_agent():
    code = """
import importlib.util
if importlib.util.find_spec("gpumond") and sys.argv[1:] != ["plain"]:
    import gpumond.agent
    gpumond.agent.start()
    gpumond.agent.stop()
import torch.nn.modules.module as module
print(type(module.__loader__), sorted(vars(module.__loader__)), module.__spec__.origin == module.__file__)
import inspect
print(inspect.getsource(module.Module.__init__)[:40], inspect.signature(torch.optim.Optimizer.__init__))
"""
    command = [sys.executable, "-c", MEASURE + code]
    shown = [
        subprocess.run([*command, *extra], env=environment("/nowhere"), capture_output=True, text=True, timeout=SECONDS)
        for extra in ((), ("plain",))
    ]
    assert shown[0].stdout == shown[1].stdout
    assert "SourceFileLoader" in shown[0].stdout


@pytest.mark.parametrize("content", ["1 / 0", "", "class Module: ..."])
def test_error_of_the_import_and_unknown_versions_are_those_of_the_program(tmp_path: Path, content: str):
    modules = tmp_path / "torch" / "nn" / "modules"
    modules.mkdir(parents=True)
    for package in (modules, modules.parent, modules.parents[1]):
        (package / "__init__.py").touch()
    (modules / "module.py").write_text(content)
    code = """
import gpumond.agent
gpumond.agent.start()
for _ in range(2):
    try:
        import torch.nn.modules.module
    except ZeroDivisionError as error:
        print("error")
from gpumond.agent.allocators.torch_objects import TORCH_OBJECTS
TORCH_OBJECTS.install()
print("torch.nn.modules.module" in sys.modules, TORCH_OBJECTS.is_complete, TORCH_OBJECTS.modules())
"""
    expected = ["error", "error", "False False []"] if content == "1 / 0" else ["True False []"]
    assert run(code, environment("/nowhere", tmp_path)) == expected


def test_program_without_pytorch_imports_nothing_for_it():
    code = """
import gpumond.agent
gpumond.agent.start()
gpumond.agent.start()
print([type(finder).__name__ for finder in sys.meta_path].count("_Finder"))
print([name for name in sys.modules if name.startswith("torch")])
"""
    assert run(code) == ["1", "[]"]
