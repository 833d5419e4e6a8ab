"""The files of the web UI, joined and compressed once."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumond.events import CONSEQUENCES, END_EVENT, EVENT_MARKS, LIBRARY_PATHS, PROGRAM_PATHS, REPEAT_SECONDS
from gpumond.facts.engines import NOT_READ
from gpumond.facts.pools import API_FORCE_HINT
from gpumond.facts.shares import FLUSH_MEANING, SHARES
from gpumond.facts.snapshot import MAX_MISSED_READINGS
from gpumond.facts.verdicts import PATTERN_NAMES, VERDICT_KINDS, VERDICT_REMEDIES
from gpumond.page.runbooks import RUNBOOKS
from gpumond.quantities import SCOPES

IMPORT = re.compile(r'^import (?:(?:\{([^}]*)\}|\* as (\w+)) from )?"\./(\w+)\.js";\n', re.MULTILINE)


EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*? |class |const )([\w$]+))", re.MULTILINE)


COMMENT = re.compile(r"^ *(?://[^\n]*|/\*\*(?:(?!\*/).)*\*/)\n", re.MULTILINE | re.DOTALL)


END_COMMENT = re.compile(r" +// [^\"`\n]*$", re.MULTILINE)
"""A comment at the end of a line. What follows has no mark that ends a text, so it isn't in one."""


STYLE_WHITESPACE = re.compile(r" */\*.*?\*/|(?<=[{};,])\s+|(?<=[a-z]:) (?!\")| (?=\{)|;(?=\n *\})")
"""A comment in the style, space after a mark outside a text, the space before a block, or its last semicolon."""


REMAINING = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def bundles(modules: Mapping[str, str], entry: str, *later: str) -> tuple[str, ...]:
    """Return one module that does what ``entry`` does, and those that do what ``later`` do. They import what they share
    with the first, and export what their entry does under its name (``$later``). ``modules``: texts by name, without
    the suffix.

    Raises ValueError if modules import one another in a circle, or contain another import or export.
    """
    first = _joined_modules(modules, entry)
    rest = [
        "".join(text for name, text in _joined_modules(modules, each).items() if name not in first) for each in later
    ]
    shared = [[f"${name}" for name in first if f" = ${name};\n" in text] for text in rest]
    exported = ", ".join(f"${name}" for name in first if any(f"${name}" in names for names in shared))
    return f"{''.join(first.values())}export {{ {exported} }};\n", *(
        f'import {{ {", ".join(names)} }} from "./{entry}.js";\n{text}export {{ ${each} }};\n'
        for each, names, text in zip(later, shared, rest, strict=True)
    )


def _joined_modules(modules: Mapping[str, str], entry: str) -> dict[str, str]:
    joined: dict[str, str] = {}
    _add_module(entry, modules, joined, ())
    return joined


def _add_module(name: str, modules: Mapping[str, str], joined: dict[str, str], importers: tuple[str, ...]) -> None:
    if name in importers:
        raise ValueError(f"modules import one another: {' -> '.join((*importers, name))}")
    if name in joined:
        return
    for found in IMPORT.finditer(modules[name]):
        _add_module(found[3], modules, joined, (*importers, name))
    joined[name] = _as_function(name, modules[name])


def _as_function(name: str, text: str) -> str:
    exports = ", ".join(EXPORT.findall(text))
    body = _without_comments(EXPORT.sub("", IMPORT.sub(_constant, text)))
    if left := REMAINING.search(body):
        raise ValueError(f"{name}.js: can't be joined: {left[0]}")
    return f"const ${name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"


def _without_comments(text: str) -> str:
    return END_COMMENT.sub("", COMMENT.sub("", text))


def _constant(found: re.Match[str]) -> str:
    names, namespace, module = found.groups()
    if names is None and namespace is None:
        return ""
    if namespace:
        return f"const {namespace} = ${module};\n"
    return f"const {{{re.sub(r' as ', ': ', names)}}} = ${module};\n"


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Vary": "Accept-Encoding",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


IMMUTABLE = "max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class File:
    """``compressed``: the body with gzip. ``cache``: its Cache-Control."""

    body: bytes
    compressed: bytes
    media_type: str
    etag: str
    cache: str


def file(body: bytes, media_type: str, cache: str = "no-cache") -> File:
    return File(body, gzip.compress(body, mtime=0), f"{media_type}; charset=utf-8", _content_hash(body), cache)


def _content_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def words_module() -> str:
    """Return the daemon's vocabulary as a JavaScript module."""
    constants: dict[str, object] = {
        "SHARES": list(SHARES),
        "OF_PROCESSES": [share for share in SHARES if share != "unattributed"],
        "ORDINARY": sorted(PATTERN_NAMES),
        "NOTES": sorted(kind.name for kind in VERDICT_KINDS if not kind.is_pattern and not kind.remedy),
        "VERDICTS": {kind.name: kind.meaning.replace("`", "") for kind in VERDICT_KINDS},
        "REMEDIES": VERDICT_REMEDIES,
        "MISSED_LIMIT": MAX_MISSED_READINGS,
        "NOT_READ": NOT_READ,
        "MARKS": EVENT_MARKS,
        "ENDED": END_EVENT,
        "FOLLOWS": CONSEQUENCES,
        "REPEATS": REPEAT_SECONDS,
        "NAMES": {"oom": "out of memory", "xid": "Xid error"},
        "RUNBOOKS": sorted(RUNBOOKS),
        "LIBRARIES": LIBRARY_PATHS,
        "OWN_FILES": PROGRAM_PATHS,
        "FORCED": API_FORCE_HINT,
    }
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in constants.items())


def rule_values_module() -> str:
    """Return the rule values that are 0 or 1, and the scopes and values of ratios that can exceed 1, as a module."""
    all_values = [(scope, value) for scope, spec in SCOPES.items() for value in spec.quantities]
    booleans = sorted({value.name for _, value in all_values if value.is_boolean})
    exceeding = [f"{scope} {value.name}" for scope, value in all_values if value.may_exceed_one]
    return f"export const BOOLEANS = {json.dumps(booleans)};\nexport const EXCEEDING = {json.dumps(exceeding)};\n"


def flush_meaning_module() -> str:
    """Return what a flush is, which only the help says, as a module."""
    return f"export const FLUSH = {json.dumps(FLUSH_MEANING)};\n"


DIRECTORY = Path(__file__).parent
MODULES = {path.stem: path.read_text("utf-8") for path in sorted(DIRECTORY.glob("*.js"))} | {
    "words": words_module(),
    "booleans": rule_values_module(),
    "flushmeaning": flush_meaning_module(),
}
"""Texts of the modules by name."""


def _without_indentation(text: str) -> str:
    """Return the text without the indentation of its lines: no text that users see has any."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def page_files() -> dict[str, File]:
    """Return the files of the page by path. The document names scripts and style, whose names contain their hash.

    ``lazyviews.js`` and ``forms.js`` are requested when one of their views or dialogs is opened.
    """
    found = {}
    page = _without_indentation((DIRECTORY / "index.html").read_text("utf-8"))
    script, lazyviews, forms = bundles(MODULES, "page", "lazyviews", "forms")
    names: dict[str, str] = {}
    for file_name, source, media_type in (
        ("page.js", script, "text/javascript"),
        ("lazyviews.js", lazyviews, "text/javascript"),
        ("forms.js", forms, "text/javascript"),
        ("earlystream.js", _without_comments(MODULES["earlystream"]), "text/javascript"),
        ("page.css", STYLE_WHITESPACE.sub("", (DIRECTORY / "page.css").read_text("utf-8")), "text/css"),
    ):
        text = _without_indentation(source)
        for name, hashed in names.items():
            text = text.replace(f'"./{name}"', f'"./{hashed}"')
        stem, suffix = file_name.split(".")
        names[file_name] = f"{stem}-{_content_hash(text.encode())}.{suffix}"
        found[f"/{names[file_name]}"] = file(text.encode(), media_type, IMMUTABLE)
        page = page.replace(f'"{file_name}"', f'"{names[file_name]}"')
    return {"/": file(page.encode(), "text/html"), **found}


PAGE = page_files()
"""They contain no data, and require no authentication, so that users can sign in."""

STYLE = next(path for path in PAGE if path.endswith(".css"))
"""Path of the style, which the pages under ``/docs`` have, too."""

FILES = PAGE | {"/docs.css": file((DIRECTORY / "docs.css").read_bytes(), "text/css")}
