"""Layout of the package: layers, the place of each library, and the size of files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

import gpumond

PACKAGE = Path(gpumond.__file__).parent
ROOT = PACKAGE.parent

LAYERS = (
    "errors",
    "model",
    "protocol",
    "history",
    "host",
    "agent",
    "inject",
    "sim",
    "sources",
    "diagnosis",
    "rules",
    "baselines",
    "engine",
    "importers",
    "collector",
    "agents",
    "engines",
    "store",
    "flush",
    "alerting",
    "config",
    "metrics",
    "api",
    "daemon",
    "loadgen",
    "top",
    "fleet",
    "cli",
    "testing",
    "__main__",
)
"""A package imports only from itself and from packages before it."""

WITHOUT_IO = ("model", "history", "diagnosis", "rules", "engine")
KEYWORDS_ONLY = ("model", "engines", "history", "diagnosis", "rules", "engine", "flush", "api")
IO_MODULES = {"os", "socket", "time", "asyncio", "threading", "subprocess", "pathlib", "io", "logging", "random"}

LIBRARIES = {
    "pynvml": ("sources.nvml",),
    "grpc": ("sources.process",),
    "prometheus_client": ("metrics",),
    "fastapi": ("api",),
    "starlette": ("api",),
    "uvicorn": ("daemon",),
    "httptools": ("daemon",),
    "bcrypt": ("config", "api"),
    "matplotlib": ("cli",),
    "yaml": ("config", "cli.rules", "fleet.discovery"),
    "cupy": ("loadgen.engines",),
    "torch": ("loadgen.engines",),
    "sitecustomize": ("agent.inject",),  # the module of the user's own name, which runs after this one
    "_xxsubinterpreters": ("agent.thread",),  # part of the standard library until 3.12
    "pydantic_core": ("protocol.validator", "alerting.expressions", "api"),
    "pydantic": (
        "protocol.encodable",
        "config.engines",
        "config.explain",
        "config.loading",
        "config.quotas",
        "config.schema",
        "config.web_file",
        "rules.config",
        "cli.rules",
        "api",
        "store.rows",
        "engine.preview",
        "alerting.receivers",
        "alerting.expressions",
    ),  # files that people write
}
"""The modules that may import a third-party library."""

ACROSS_PACKAGES = {
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
    ("pickle", "agent.administration"),  # writes a snapshot in the format of memory_viz, and reads none
    ("pickle", "cli.forked"),  # reads from a process that it has forked
}
MAX_LINES = 400
MEDIAN_LINES = 130


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
EACH_MODULE = pytest.mark.parametrize("module", FILES, ids=[name or "gpumond" for name in FILES])


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
            yield node.module
            if node.module == "gpumond" or node.module.startswith("gpumond."):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


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


def test_layers_name_every_package():
    assert {layer(module) for module in FILES} - {""} == set(LAYERS)


@EACH_MODULE
def test_imports_point_down_the_layers(module: str):
    if module == "":
        assert not own_imports(module)
        return
    below = LAYERS[: LAYERS.index(layer(module)) + 1]
    assert not [name for name in own_imports(module) if layer(name) not in below]


@EACH_MODULE
def test_third_party_libraries_are_imported_only_where_listed(module: str):
    for name in imports(module):
        library = name.partition(".")[0]
        if library in LIBRARIES:
            assert within(module, LIBRARIES[library]), f"{module} imports {library}"
        elif library != "gpumond":
            assert library in sys.stdlib_module_names, f"{module} imports {library}, which has no home"
        assert library not in FORBIDDEN or (library, module) in PICKLES, f"{module} imports {library}"


@pytest.mark.parametrize("module", [name for name in FILES if within(name, ("agent", "inject"))])
def test_agent_imports_the_standard_library_model_and_protocol_only(module: str):
    allowed = ("agent", "model.pools", "model.program", "protocol.messages", "protocol.sockets", "errors")
    at_run_time = own_imports(module, types=False)
    assert not [name for name in at_run_time if not within(name, allowed) and name not in ("model", "protocol")]


@pytest.mark.parametrize("module", [name for name in FILES if within(name, WITHOUT_IO)])
def test_conclusions_are_drawn_without_io(module: str):
    assert not IO_MODULES & {name.partition(".")[0] for name in imports(module)}


@pytest.mark.parametrize("module", [name for name in FILES if within(name, ("loadgen",))])
def test_random_numbers_come_from_a_seeded_generator(module: str):
    tree = parsed(module)
    drawn = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "random"]
    assert {alias.name for node in drawn for alias in node.names} <= {"Random"}
    assert "random" not in {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }


@pytest.mark.parametrize("module", [name for name in FILES if within(name, KEYWORDS_ONLY)])
def test_constructors_of_more_than_five_fields_take_keywords(module: str):
    for node in ast.walk(parsed(module)):
        decorators = [ast.unparse(each) for each in node.decorator_list] if isinstance(node, ast.ClassDef) else []
        if any("dataclass" in text and "kw_only=True" not in text for text in decorators):
            assert sum(isinstance(each, ast.AnnAssign) for each in node.body) <= 5, node.name


def test_imports_have_no_cycle():
    graph = {module: own_imports(module, types=False) - {module} for module in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in graph[module]:
                if not module.startswith(f"{other}."):  # a package is imported before its modules
                    visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_packages_hold_more_than_one_file():
    packages = {path.parent for path in FILES.values() if path.name == "__init__.py"} - {PACKAGE}
    files = {package: [path for path in package.iterdir() if path.name != "__pycache__"] for package in packages}
    assert not [package for package, contents in files.items() if len(contents) < 2]


def test_module_with_one_importer_is_in_its_package():
    """A module that imports nothing of its package, and that only one other package's module imports, belongs there."""
    uses = {module: own_imports(module) - {module} for module in FILES}
    for module, path in FILES.items():
        importers = [other for other, used in uses.items() if module in used]
        if "." in module and path.name != "__init__.py" and len(importers) == 1:
            own = {name for name in (*importers, *uses[module]) if layer(name) == layer(module)}
            assert own, f"{module} is imported by {importers[0]} only"


def test_files_are_short():
    folders = ("gpumond", "tests", "tools", "bench", "grafana")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".js")]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    assert not [path for path, lines in lengths.items() if lines > MAX_LINES]
    for folder in ("gpumond", "tests"):
        assert median(lines for path, lines in lengths.items() if path.is_relative_to(ROOT / folder)) <= MEDIAN_LINES


def test_folders_of_tests_are_packages():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - ACROSS_PACKAGES <= set(LAYERS)


def test_module_names_are_specific():
    drawers = {"utils", "helpers", "common", "manager", "misc"}
    assert not [module for module in FILES if drawers & set(module.split("."))]


def test_root_holds_entry_points_only():
    assert {path.name for path in PACKAGE.glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "errors.py",
        "inject.py",  # the import name in environments that an earlier version prepared
        "testing.py",
    }


def test_core_runs_without_extras(tmp_path: Path):
    """The agent and the command line need the standard library alone."""
    (tmp_path / "gpumond").symlink_to(PACKAGE)
    program = "import gpumond.agent as a, gpumond.cli; a.start(workload='x'); a.flush(); a.stop(); print('done')"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
