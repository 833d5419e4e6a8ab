"""Layout of the package: layers and the place of each library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gpumond.agent
from gpumond.agent.allocators import cuda
from gpumond.features import FEATURES

PACKAGE = Path(gpumond.__file__).parent
ROOT = PACKAGE.parent

LAYERS = (
    "facts",
    "host",
    "agent",
    "sim",
    "devices",
    "tick",
    "programs",
    "diagnosis",
    "events",
    "quantities",
    "metrics",
    "store",
    "config",
    "core",
    "page",
    "serve",
    "view",
    "cli",
    "top",
    "jupyter",
    "feature",
    "features",
    "daemon",
    "commands",
    "__main__",
)
"""A package imports only from itself and from packages before it."""

SETTINGS_OF_FEATURES = ("config.settings",)
"""It assembles one model of the configuration file from the settings of all features."""

WITHOUT_IO = ("tick", "diagnosis", "quantities")
"""Packages that draw conclusions; so do the modules whose docstring says ``No I/O.``"""
IO_MODULES = {"os", "socket", "asyncio", "threading", "subprocess", "pathlib", "io", "logging"}

LIBRARIES = {
    "pynvml": ("devices.nvml",),
    "grpc": ("devices.process",),
    "prometheus_client": ("metrics",),
    "fastapi": ("serve", "page", "features"),
    "starlette": ("serve", "page", "features"),
    "uvicorn": ("serve", "daemon"),
    "httptools": ("serve",),
    "bcrypt": ("config", "serve"),
    "yaml": ("config", "features.rules", "features.fleet"),
    "cupy": ("features.loadgen.backends",),
    "torch": ("features.fit.tracer",),
    "sitecustomize": ("agent.inject",),  # the module of the user's own name, which runs after this one
    "_xxsubinterpreters": ("agent.interpreter",),  # part of the standard library until 3.12
    "pydantic_core": ("serve", "features"),
    "pydantic": ("config", "serve", "page", "store", "features"),  # what people write, and what the store keeps
}
"""The modules that may import a third-party library."""

ACROSS_PACKAGES = {
    "fakecuda",
    "fakenvml",
    "fixtures",
    "gpu",
    "grafana",
    "integration",
    "isolation",
    "packaging",
    "simulator",
    "soak",
}
"""Folders of tests that concern several packages, or none."""

FORBIDDEN = ("pickle", "marshal", "shelve", "multiprocessing")
PICKLES = {
    # They write a snapshot in the format of memory_viz, and read none.
    ("pickle", "agent.requests"),
    ("pickle", "agent.allocators.torch"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@cache
def imports(module: str, types: bool = True) -> tuple[str, ...]:
    """Names of all modules that a module imports, at any depth; without ``types``, those imported at run time."""
    return tuple(_imports(module, types))


def _imports(module: str, types: bool) -> Iterator[str]:
    for node in _nodes(parsed(module), types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            modules = {
                alias.name for alias in node.names if f"{node.module}.{alias.name}".removeprefix("gpumond.") in FILES
            }
            yield from (f"{node.module}.{name}" for name in modules)
            if len(modules) < len(node.names):
                yield node.module


def _nodes(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _nodes(child, types)


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def own_imports(module: str, types: bool = True) -> set[str]:
    """Modules of gpumond that a module imports, without the prefix ``gpumond.``."""
    return {name.removeprefix("gpumond.") for name in imports(module, types)} & set(FILES) - {""}


def layer(module: str) -> str:
    return module.partition(".")[0]


def draws_conclusions(module: str) -> bool:
    return within(module, WITHOUT_IO) or "No I/O." in (ast.get_docstring(parsed(module)) or "")


def test_layers_name_every_package():
    assert {layer(module) for module in FILES} - {""} == set(LAYERS)


def test_imports_point_down_the_layers():
    assert not own_imports("")
    for module in FILES.keys() - {"", *SETTINGS_OF_FEATURES}:
        below = LAYERS[: LAYERS.index(layer(module)) + 1]
        assert [name for name in own_imports(module) if layer(name) not in below] == [], module


def test_features_are_independent_of_each_other():
    """A feature offers what others need as a service of the core or as a value in facts."""
    found = {
        (module, name)
        for module in FILES
        for name in own_imports(module)
        if within(module, ("features",))
        and within(name, ("features",))
        and name != "features"
        and module.split(".")[1:2] != name.split(".")[1:2]
        and module != "features"
    }
    assert not found


def test_core_imports_no_feature():
    for module in FILES.keys() - set(SETTINGS_OF_FEATURES):
        if not within(module, ("features", "daemon", "commands")):
            assert [name for name in own_imports(module) if within(name, ("features",))] == [], module


def test_third_party_libraries_are_imported_only_where_listed():
    for module, name in ((each, name) for each in FILES for name in imports(each)):
        library = name.partition(".")[0]
        if library in LIBRARIES:
            assert within(module, LIBRARIES[library]), f"{module} imports {library}"
        elif library != "gpumond":
            assert library in sys.stdlib_module_names, f"{module} imports {library}, which has no home"
        assert library not in FORBIDDEN or (library, module) in PICKLES, f"{module} imports {library}"


def test_agent_imports_the_standard_library_and_facts_only():
    allowed = (
        "agent",
        "facts.pools",
        "facts.program",
        "facts.messages",
        "facts.typed_json",
        "facts.errors",
        "facts.units",
    )
    for module in (name for name in FILES if within(name, ("agent",))):
        at_run_time = own_imports(module, types=False) - {"facts"}
        assert [name for name in at_run_time if not within(name, allowed)] == [], module


def test_parts_of_the_agent_import_in_one_direction():
    """The allocators know nothing of the agent around them, and the measurements only the allocators."""
    known = {
        "agent.allocators": ("agent.imports",),
        "agent.measure": ("agent.allocators", "agent.loaded_allocators"),
    }
    for part, below in known.items():
        for module in (name for name in FILES if within(name, (part,))):
            own = [name for name in own_imports(module) if within(name, ("agent",))]
            assert [name for name in own if not within(name, (part, *below))] == [], module


def test_conclusions_are_drawn_without_io():
    for module in filter(draws_conclusions, FILES):
        assert not IO_MODULES & {name.partition(".")[0] for name in imports(module)}, module
        assert names_from(module, "time") <= {"gmtime", "strftime"}, module  # the text of a given time


def test_random_numbers_come_from_a_seeded_generator():
    for module in (name for name in FILES if draws_conclusions(name) or within(name, ("features.loadgen",))):
        assert names_from(module, "random") <= {"Random"}, module


def names_from(module: str, library: str) -> set[str]:
    """Names that a module imports from a library, and the library's own if it imports the whole."""
    names = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & {library}
        elif isinstance(node, ast.ImportFrom) and node.module == library:
            names |= {alias.name for alias in node.names}
    return names


def test_imports_have_no_cycle():
    """Imports for types count, except those of `features.engines`, and those of a package by its own modules."""
    untyped = ("features.engines",)
    graph = {module: own_imports(module, types=not within(module, untyped)) - {module} for module in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_module_of_the_agent_has_the_name_of_a_function():
    """An import of the module would replace the function in the package."""
    assert not {name.removeprefix("agent.") for name in FILES} & set(gpumond.agent.__all__)


def test_folders_of_tests_are_packages():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - ACROSS_PACKAGES - {"helpers"} <= set(LAYERS) | {feature.name for feature in FEATURES}


def test_no_test_module_is_imported():
    """What tests share is in a module of their folder, or in tests/helpers if several folders use it."""
    for path in (each for folder in ("tests", "bench", "tools") for each in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert not [name for name in names if ".test_" in name], f"{path}: {node.module}"


def test_core_runs_without_extras(tmp_path: Path):
    """The agent and the command line need the standard library alone."""
    (tmp_path / "gpumond").symlink_to(PACKAGE)
    program = (
        "import gpumond.agent as a, gpumond.commands.main; a.start(workload='x'); a.flush(); a.stop(); print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_digests_are_compared_in_constant_time():
    tree = ast.parse((PACKAGE / "serve/authentication.py").read_text())
    names = {"digest", "presented"}
    compared = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(each, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for each in node.ops)
        and names & {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}
    ]
    assert compared == []
    assert "hmac.compare_digest(presented, entry.digest)" in ast.unparse(tree)


def test_programs_that_run_only_on_a_gpu_use_functions_that_exist():
    texts = [path.read_text() for path in (ROOT / "tests/gpu").glob("*.py")]
    programs = [text for text in texts if "allocators import cuda" in text or "gpu.adapter_programs" in text]
    used = {name for text in programs for name in re.findall(r"(?<![\w.])cuda\.([a-z]\w*)(?=[(\n])", text)}
    assert "devices_with_context" in used
    assert {name for name in used if not hasattr(cuda, name)} == set()
