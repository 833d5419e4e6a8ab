"""A function that is called when the program has imported a module."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpumond.agent.imports import when_imported


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Write a module of this test's own, and return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, suffix: str = "") -> str:
        name = f"awaited_{abs(hash(request.node.nodeid)):x}{suffix}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return name

    return write


class Calls:
    def __init__(self) -> None:
        self.modules: list[ModuleType] = []

    def __call__(self, module: ModuleType) -> None:
        self.modules.append(module)


def test_the_function_is_called_before_the_import_returns_and_once(write: Callable[..., str]) -> None:
    calls, name = Calls(), write("complete = False\nvalue = 5\ncomplete = True\n")
    when_imported(name, lambda module: calls(module) if module.complete else None)
    module = importlib.import_module(name)
    assert calls.modules == [module]
    importlib.reload(module)
    assert calls.modules == [module]


def test_a_module_that_is_imported_already(write: Callable[..., str]) -> None:
    calls, module = Calls(), importlib.import_module(write("value = 5\n"))
    when_imported(module.__name__, calls)
    assert calls.modules == [module]


def test_the_module_is_what_it_is_without_the_function(write: Callable[..., str]) -> None:
    text = "loaders = __loader__, __spec__.loader\nclass Value: pass\ndef double(x): return 2 * x\n"
    plain = importlib.import_module(write(text, "_plain"))
    name = write(text)
    when_imported(name, Calls())
    module = importlib.import_module(name)
    assert module.__spec__ is not None
    for loader in (module.__loader__, module.__spec__.loader, *module.loaders):
        assert type(loader) is type(plain.__loader__)
        assert loader is module.__loader__
    assert vars(module).keys() == vars(plain).keys()
    assert inspect.getsource(module.double) == inspect.getsource(plain.double)
    assert isinstance(copy.deepcopy(module.Value()), module.Value)
    assert pickle.dumps(module.Value())


def test_a_search_without_an_import_calls_nothing(write: Callable[..., str]) -> None:
    calls, name = Calls(), write("value = 5\n")
    when_imported(name, calls)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    loader: Any = spec.loader
    assert loader.is_package(name) is False
    assert copy.copy(loader).get_filename(name) == spec.origin
    assert calls.modules == []
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert calls.modules == [module]


def test_a_lazy_loader_calls_when_the_module_is_used(write: Callable[..., str]) -> None:
    calls, name = Calls(), write("value = 5\n")
    when_imported(name, calls)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert calls.modules == []
    assert module.value == 5
    assert calls.modules == [module]


def test_a_failed_import_raises_its_own_error_and_the_next_one_calls(write: Callable[..., str], tmp_path: Path) -> None:
    calls, name = Calls(), write("raise OSError('no driver')\n")
    when_imported(name, calls)
    with pytest.raises(OSError, match="no driver"):
        importlib.import_module(name)
    assert calls.modules == []
    assert name not in sys.modules
    (tmp_path / f"{name}.py").write_text("value = 'a longer text'\n")
    assert importlib.import_module(name).value
    assert len(calls.modules) == 1


def test_a_missing_module_stays_missing() -> None:
    calls = Calls()
    when_imported("awaited_and_missing", calls)
    with pytest.raises(ModuleNotFoundError, match="awaited_and_missing"):
        importlib.import_module("awaited_and_missing")
    assert calls.modules == []


def test_an_error_of_a_function_reaches_neither_the_import_nor_the_next_function(write: Callable[..., str]) -> None:
    calls, name = Calls(), write("value = 5\n")
    when_imported(name, calls)
    when_imported(name, lambda module: module.missing)
    assert importlib.import_module(name).value == 5
    assert len(calls.modules) == 1


def test_a_module_that_is_being_imported_now(write: Callable[..., str]) -> None:
    calls, name = Calls(), write("import sys; sys.ask(__name__)\nvalue = 5\n")
    sys.ask = lambda name: when_imported(name, calls)  # type: ignore[attr-defined]
    try:
        module = importlib.import_module(name)
    finally:
        del sys.ask  # type: ignore[attr-defined]
    assert calls.modules == []
    when_imported(name, calls)
    assert calls.modules == [module]


def test_a_module_that_puts_another_object_in_its_place(write: Callable[..., str]) -> None:
    calls, name = Calls(), write("import sys, types\nsys.modules[__name__] = types.SimpleNamespace(value=5)\n")
    when_imported(name, calls)
    assert importlib.import_module(name).value == 5
    assert [module.value for module in calls.modules] == [5]


def test_a_submodule_a_namespace_package_and_a_frozen_module(tmp_path: Path, write: Callable[..., str]) -> None:
    package = write("", "_package")
    (tmp_path / f"{package}.py").unlink()
    (tmp_path / package).mkdir()
    (tmp_path / package / "inner.py").write_text("value = 5\n")
    importlib.invalidate_caches()
    inner, outer, frozen = Calls(), Calls(), Calls()
    when_imported(f"{package}.inner", inner)
    when_imported(package, outer)
    assert importlib.import_module(f"{package}.inner").value == 5
    assert len(inner.modules) == 1
    assert outer.modules == []
    sys.modules.pop("__phello__", None)
    when_imported("__phello__", frozen)
    if importlib.util.find_spec("__phello__") is not None:
        importlib.import_module("__phello__")
        assert len(frozen.modules) == 1


def test_other_finders_keep_their_say(write: Callable[..., str]) -> None:
    calls, asked, name = Calls(), [], write("value = 5\n")

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            asked.append(name)

    class WithoutSearch:
        pass

    when_imported(name, calls)
    before = list(sys.meta_path)
    # the one behind, which Python itself would answer with a warning, is asked by the agent's finder only
    sys.meta_path[:] = [Finder(), *before[:1], WithoutSearch(), *before[1:]]  # type: ignore[list-item]
    try:
        assert importlib.import_module(name).value == 5
    finally:
        sys.meta_path[:] = before
    assert name in asked
    assert len(calls.modules) == 1


def test_threads_that_import_at_once_call_once(write: Callable[..., str]) -> None:
    calls, name = Calls(), write("import time\ntime.sleep(0.05)\nvalue = 5\n")
    when_imported(name, calls)
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        assert importlib.import_module(name).value == 5

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls.modules) == 1


def test_a_forked_child_calls_for_its_own_import(write: Callable[..., str]) -> None:
    name = write("value = 5\n")
    when_imported(name, lambda module: setattr(module, "seen", True))
    pid = os.fork()
    if not pid:
        os._exit(0 if getattr(importlib.import_module(name), "seen", False) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert importlib.import_module(name).seen


def test_it_loads_no_module_of_the_import_system() -> None:
    first = "import gpumond.agent, sys; before = set(sys.modules)"
    program = f"{first}; import gpumond.agent.imports; print(*set(sys.modules) - before)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["gpumond.agent.imports"]
