"""The dependency rule, executed: imports point towards the model, and each library has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumond

PACKAGE = Path(gpumond.__file__).parent
EDGES = ("sources", "intake", "notify", "api", "metrics", "store")
KNOW_MORE_THAN_ONE_EDGE = ("daemon", "cli")
PURE = (
    "model",
    "devices",
    "plans",
    "pools",
    "sensors",
    "program",
    "events",
    "attribution",
    "claims",
    "stretches",
    "shares",
    "unsent",
    "engine",
    "rules",
    "rules.actions",
    "rules.built_in",
    "rules.preview",
    "rules.recent",
    "rules.scopes",
    "rules.scopes.daemon",
    "rules.scopes.device",
    "rules.scopes.pool",
    "rules.scopes.process",
    "rules.scopes.seen",
    "rules.scopes.workload",
    "rules.values",
    "rules.verdicts",
    "history",
    "series",
    "diagnosis",
    "diagnosis.alarms",
    "diagnosis.course",
    "diagnosis.form",
    "diagnosis.fragmentation",
    "diagnosis.judge",
    "diagnosis.leak",
    "diagnosis.levels",
    "diagnosis.peaks",
    "diagnosis.ranks",
    "diagnosis.sentences",
    "diagnosis.shapes",
    "diagnosis.trend",
    "diagnosis.watch",
    "units",
    "conditions",
    "idleness",
    "mends",
    "stuck",
    "palette",
    "top",
    "top.bars",
    "top.ledger",
    "top.plain",
    "top.remarks",
    "top.rows",
    "top.view",
    "recorded.moments",
    "records",
    "resume",
    "audit",
    "baseline",
    "measuring",
    "errors",
    "loadgen.plan",
    "loadgen.scenarios",
    "loadgen.script",
    "loadgen.options",
    "loadgen.walk",
    "loadgen.hosts",
    "loadgen.leaks",
    "loadgen.incidents",
    "loadgen.ordinary",
    "loadgen.drills",
    "loadgen",
)
SEEDED = ("loadgen",)
"""Pure, and drawing: from a generator with a seed of its own, never from the module's."""

HOMES = {
    "pynvml": ("sources",),
    "grpc": ("sources",),
    "prometheus_client": ("metrics",),
    "fastapi": ("api",),
    "starlette": ("api",),
    "uvicorn": ("server", "receiving"),
    "httptools": ("receiving",),
    "bcrypt": ("webconfig", "api.basic"),
    "matplotlib": ("cli.plot",),
    "textual": ("top",),
    "rich": ("top",),
    "yaml": ("config", "webconfig", "rules.cases"),
    "cupy": ("loadgen.engines",),
    "torch": ("loadgen.engines",),
    "sitecustomize": ("agent",),  # the user's own, after which ours comes
    "_xxsubinterpreters": ("agent.loop",),  # the standard library's own until 3.12, though not in its list
    "pydantic_core": ("decoding",),
    # the doors through which what people write comes in
    "pydantic": ("config", "webconfig", "rules.config", "rules.cases", "rules.preview", "api", "store.rows", "text"),
}
FORBIDDEN = ("pickle", "marshal", "shelve", "multiprocessing")
MAX_LINES = 400
MEDIAN_LINES = 130


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, at any depth. Only the agent may name types without importing them."""
    lazy = path.relative_to(PACKAGE).parts[0] == "agent"
    for node in _running(ast.parse(path.read_text()), lazy):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            yield node.module
            if node.module == "gpumond" or node.module.startswith("gpumond."):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _running(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if lazy and isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _running(child, lazy)


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def own(path: Path) -> set[str]:
    """The gpumond modules that a file imports, without the package's name."""
    known = {name for name, _ in modules()}
    return {name.removeprefix("gpumond.") for name in imports(path)} & known


ALL = list(modules())
ids = [name or "gpumond" for name, _ in ALL]


@pytest.mark.parametrize(("module", "path"), ALL, ids=ids)
def test_edges_do_not_know_each_other(module: str, path: Path):
    if within(module, KNOW_MORE_THAN_ONE_EDGE):
        return
    edges = {edge for edge in EDGES for name in own(path) if within(name, (edge,))}
    edges -= {edge for edge in EDGES if within(module, (edge,))}
    assert len(edges) <= (0 if within(module, EDGES) else 1), f"{module} imports {sorted(edges)}"


@pytest.mark.parametrize(("module", "path"), ALL, ids=ids)
def test_each_library_has_its_home(module: str, path: Path):
    for name in imports(path):
        library = name.partition(".")[0]
        if library in HOMES:
            assert within(module, HOMES[library]), f"{module} imports {library}"
        elif library != "gpumond":
            assert library in sys.stdlib_module_names, f"{module} imports {library}, which has no home"
        assert library not in FORBIDDEN, f"{module} imports {library}"


@pytest.mark.parametrize(("module", "path"), [entry for entry in ALL if within(entry[0], ("agent",))])
def test_the_agent_needs_only_pools_wire_and_the_standard_library(module: str, path: Path):
    allowed = ("agent", "inject", "pools", "program", "wire", "errors")
    assert not [name for name in own(path) if name and not within(name, allowed)]


@pytest.mark.parametrize(("module", "path"), [entry for entry in ALL if entry[0] in PURE])
def test_what_decides_does_nothing_else(module: str, path: Path):
    touching = {"os", "socket", "time", "asyncio", "threading", "subprocess", "pathlib", "io", "logging", "random"}
    if within(module, SEEDED):
        touching.remove("random")
        drawn = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert {alias.name for node in drawn if node.module == "random" for alias in node.names} <= {"Random"}
        assert "import random" not in path.read_text()
    assert not touching & {name.partition(".")[0] for name in imports(path)}
    assert not own(path) - {"", *PURE}


def test_there_is_no_import_cycle():
    graph = {name: own(path) - {name} for name, path in ALL}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name]:
                if not name.startswith(f"{other}."):  # a package is imported before what is in it
                    visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_files_are_short():
    lengths = sorted((len(path.read_text().splitlines()), name) for name, path in ALL)
    assert lengths[-1][0] <= MAX_LINES, lengths[-1]
    assert lengths[len(lengths) // 2][0] <= MEDIAN_LINES


def test_no_file_is_a_drawer():
    drawers = {"utils", "helpers", "common", "manager"}
    assert not [name for name, _ in ALL if drawers & set(name.split("."))]


def test_the_core_runs_without_the_extras(tmp_path: Path):
    """What the agent's users install: no site-packages, only the package."""
    (tmp_path / "gpumond").symlink_to(PACKAGE)
    program = "import gpumond.agent as a, gpumond.cli; a.start(workload='x'); a.flush(); a.stop(); print('well')"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("well\n", "")
