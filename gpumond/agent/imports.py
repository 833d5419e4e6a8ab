"""Calls a function as soon as the program has imported a module, before the program's next statement.

The agent must not import a framework, and some things can only be done before the program has used one: a search once
a second comes too late. A finder on ``sys.meta_path`` sees the import of the modules that are waited for, and of these
only. It stays there for good, since an import in another thread may be iterating over that list; once it waits for
nothing it costs an import a tenth of a microsecond. Nothing here takes a lock, so a fork can't leave one locked.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Function = Callable[[ModuleType], object]

_waiting_functions: dict[str, dict[Function, None]] = {}
"""Functions by the name of their module. An entry is removed right before its call, and made empty, never deleted."""


def when_imported(name: str, function: Function) -> None:
    """Call ``function(module)`` once the module has been imported completely; at once if it is already.

    The call happens in the importing thread, before its import statement returns. An import that fails leaves the
    function waiting for the next one. Errors of the function are discarded. A namespace package and a module whose
    loader has no ``exec_module`` are not noticed, nor is an import that is in progress.

    Args:
        name: the module's full name, such as ``rmm.mr``.
        function: gets the module. Must be able to bear a second call.
    """
    _waiting_functions.setdefault(name, {})[function] = None
    if not any(finder is _finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is not None and not is_importing(module):
        _call_functions(name, module)


def is_importing(module: object) -> bool:
    """Return whether the import of a module is still in progress."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _call_functions(name: str, module: ModuleType) -> None:
    functions = _waiting_functions.get(name, {})
    while functions:
        try:
            function, _ = functions.popitem()
            function(module)
        except Exception:  # must not reach the program's import; KeyError: another thread took the last function
            continue


class _Finder:
    """Leaves the search to the other finders, and the module as they make it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _waiting_functions.get(name):
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, spec)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Loads a module with its own loader, which is again the module's loader when its code runs."""

    __slots__ = ("_loader", "_spec")

    def __init__(self, loader: Any, spec: ModuleSpec) -> None:
        self._loader, self._spec = loader, spec

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these before the loader is set
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        for spec in (self._spec, getattr(module, "__spec__", None)):
            if spec is not None and spec.loader is self:
                spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        name = self._spec.name
        _call_functions(name, sys.modules.get(name, module))


_finder = _Finder()
