"""Modules and optimizers of PyTorch that the program creates, as weak references.

PyTorch's global registration hooks report each module as its parts are registered, and three wrapped methods report
the others: optimizers, copies, and modules from files. They are in place before PyTorch's first module exists if the
agent started before PyTorch was imported. Otherwise a search of the heap completes them.

`install` runs at the start of each program with the agent: this file imports only what it needs.
"""

from __future__ import annotations

import sys

from gpumond.agent.imports import is_importing, when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType
    from typing import Any
    from weakref import WeakValueDictionary

NN_MODULE, OPTIMIZER_MODULE, SCRIPT_MODULE = "torch.nn.modules.module", "torch.optim.optimizer", "torch.jit._script"
HOOKED_MODULES = (NN_MODULE, OPTIMIZER_MODULE, SCRIPT_MODULE)


class TorchObjects:
    """The program's modules and optimizers. The functions that PyTorch calls never raise."""

    def __init__(self) -> None:
        self._modules: WeakValueDictionary[int, Any] | None = None
        self._optimizers: WeakValueDictionary[int, Any] | None = None
        self._hooked_modules: dict[str, ModuleType] = {}
        self._has_older_objects = False

    def install(self) -> None:
        """Register with PyTorch, now or when the program imports it. Never imports it, and never raises."""
        try:
            for name in HOOKED_MODULES:
                module = sys.modules.get(name)
                if module is None:
                    when_imported(name, self.register_hooks)
                elif self._hooked_modules.get(name) is not module and not is_importing(module):
                    self._has_older_objects = True
                    self.register_hooks(module)
        except Exception:  # a version of the library that is not understood
            return

    @property
    def is_complete(self) -> bool:
        """True if every module and optimizer is known."""
        return self._is_registered() and not self._has_older_objects

    @property
    def needs_search(self) -> bool:
        """True if only objects that are older than the registration are unknown."""
        return self._is_registered() and self._has_older_objects

    def _is_registered(self) -> bool:
        return bool(self._hooked_modules) and all(
            self._hooked_modules.get(name) is sys.modules.get(name) for name in HOOKED_MODULES
        )

    def add(self, modules: Iterable[Any], optimizers: Iterable[Any]) -> None:
        """Add the objects of a search of the whole heap that began after `install`."""
        if self._modules is not None and self._optimizers is not None:
            for module in modules:
                _add(self._modules, module)
            for optimizer in optimizers:
                _add(self._optimizers, optimizer)
            self._has_older_objects = False

    def modules(self) -> list[Any]:
        return _existing_objects(self._modules)

    def optimizers(self) -> list[Any]:
        return _existing_objects(self._optimizers)

    def register_hooks(self, module: ModuleType) -> None:
        """Register with a file of PyTorch that was imported."""
        name = module.__name__
        if self._modules is None:
            from weakref import WeakValueDictionary

            self._modules, self._optimizers = WeakValueDictionary(), WeakValueDictionary()
        modules, optimizers = self._modules, self._optimizers
        loaded: Any = module
        if name == NN_MODULE:
            torch = loaded.torch

            def registered(parent: Any, _: str, part: Any) -> None:
                if not _is_compiling(torch):
                    _add(modules, parent)

            def registered_module(parent: Any, _: str, part: Any) -> None:
                if not _is_compiling(torch):
                    _add(modules, parent)
                    _add(modules, part)

            loaded.register_module_parameter_registration_hook(registered)
            loaded.register_module_buffer_registration_hook(registered)
            loaded.register_module_module_registration_hook(registered_module)
            _track_calls(loaded.Module, "__setstate__", modules)  # of copies, and of modules from a file
        elif name == OPTIMIZER_MODULE:
            _track_calls(loaded.Optimizer, "__init__", optimizers)
            _track_calls(loaded.Optimizer, "__setstate__", optimizers)
        elif hasattr(loaded, "RecursiveScriptModule"):
            _track_calls(loaded.RecursiveScriptModule, "__init__", modules)  # of `torch.jit.load`
        self._hooked_modules[name] = module


def _track_calls(cls: Any, name: str, objects: Any) -> None:
    """Wrap a method that prepares a new object."""
    from functools import wraps

    method = cls.__dict__[name]

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        _add(objects, self)
        return result

    setattr(cls, name, wrapped)


def _is_compiling(torch: Any) -> bool:
    """Return whether torch.compile traces the caller: it cannot trace weak references."""
    try:
        return bool(torch.compiler.is_dynamo_compiling())
    except AttributeError:  # while PyTorch is imported
        return False


def _add(objects: Any, new: Any) -> None:
    try:
        if new is not None and id(new) not in objects:
            objects[id(new)] = new
    except Exception:  # a subclass without weak references
        return


def _existing_objects(objects: WeakValueDictionary[int, Any] | None) -> list[Any]:
    """Return the objects that exist. The list of references is made at once: other threads add and remove some."""
    references = () if objects is None else objects.valuerefs()
    return [existing for reference in references if (existing := reference()) is not None]


TORCH_OBJECTS = TorchObjects()
