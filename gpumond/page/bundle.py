"""Joins ES modules into one, so that the page needs one request for its script. Performs no I/O.

Each module becomes a function that returns its exports, called once, after the modules that it imports. Accepted are
`import { a, b as c } from "./name.js"`, `import * as a from "./name.js"`, `import "./name.js"`, and `export` before a
function, a class or a constant. An exported variable is refused: the importing module would keep its first value.
Comments that are lines of their own are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

IMPORT = re.compile(r'^import (?:(?:\{([^}]*)\}|\* as (\w+)) from )?"\./(\w+)\.js";\n', re.MULTILINE)


EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*? |class |const )([\w$]+))", re.MULTILINE)


COMMENT = re.compile(r"^ *(?://[^\n]*|/\*\*(?:(?!\*/).)*\*/)\n", re.MULTILINE | re.DOTALL)


LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def bundle(modules: Mapping[str, str], entry: str) -> str:
    """Return one module that does what ``entry`` does. ``modules``: texts by name, without the suffix.

    Raises ValueError if modules import one another in a circle, or contain another import or export.
    """
    joined: dict[str, str] = {}
    _add(entry, modules, joined, ())
    return "".join(joined.values())


def _add(name: str, modules: Mapping[str, str], joined: dict[str, str], importers: tuple[str, ...]) -> None:
    if name in importers:
        raise ValueError(f"modules import one another: {' -> '.join((*importers, name))}")
    if name in joined:
        return
    for found in IMPORT.finditer(modules[name]):
        _add(found[3], modules, joined, (*importers, name))
    joined[name] = _function(name, modules[name])


def _function(name: str, text: str) -> str:
    exports = ", ".join(EXPORT.findall(text))
    body = COMMENT.sub("", EXPORT.sub("", IMPORT.sub(_constant, text)))
    if left := LEFT.search(body):
        raise ValueError(f"{name}.js: cannot be joined: {left[0]}")
    return f"const ${name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"


def _constant(found: re.Match[str]) -> str:
    names, whole, module = found.groups()
    if names is None and whole is None:
        return ""
    if whole:
        return f"const {whole} = ${module};\n"
    return f"const {{{re.sub(r' as ', ': ', names)}}} = ${module};\n"
