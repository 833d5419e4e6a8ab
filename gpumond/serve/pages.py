"""The files of the web UI, the API reference from the OpenAPI document, and the runbooks to which alerts link."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Scope

from gpumond.facts.units import accepts
from gpumond.page.files import FILES, HEADERS, STYLE, File, file
from gpumond.page.runbooks import INTRODUCTION, SECTIONS
from gpumond.serve.authentication import header
from gpumond.serve.responses import problem

router = APIRouter(include_in_schema=False)

Schema = Mapping[str, Any]

HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>gpumond: {title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{root}{style}">
<link rel="stylesheet" href="{root}docs.css">
</head>
<body>
<header>
<h1>gpumond</h1>
<nav id="views" aria-label="Views">
<a href="{root}./">Overview</a> <a href="{root}docs">API</a> <a href="{root}docs/runbooks/">Runbooks</a>
<a href="{root}metrics">Metrics</a>
</nav>
</header>
<main>
<h2>{title}</h2>
"""
END = "</main>\n</body>\n</html>\n"


def _head(title: str, root: str = "") -> str:
    """Return the beginning of a page; ``root`` is the path from the page to the daemon's root."""
    return HEAD.format(title=escape(title), root=root, style=STYLE[1:])


def reference_page(openapi: Schema) -> str:
    """Return the page. Each operation is a collapsed section; browsers expand it for search and print."""
    info = openapi["info"]
    return "\n".join(
        (
            _head(f"API {info['version']}"),
            f'<p>{inline_html(info["description"])} Machine-readable: <a href="openapi.json">openapi.json</a>.</p>',
            *_operations(openapi["paths"]),
            "<h2>Types</h2>",
            *(_type(name, schema) for name, schema in sorted(openapi["components"]["schemas"].items())),
            END,
        )
    )


def _operations(paths: Schema) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for path, methods in paths.items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(_operation(method.upper(), path, operation))
    for group, operations in groups.items():
        yield f"<h2>{escape(group.capitalize())}</h2>"
        yield from operations


def _operation(method: str, path: str, operation: Schema) -> str:
    token = ' <span class="quiet">requires a token</span>' if operation.get("security") else ""
    head = f"<code><b>{method}</b> {escape(path)}</code> {inline_html(operation['summary'])}{token}"
    parts = [
        *_paragraphs(operation.get("description", "")),
        *_table("Parameter", map(_parameter, operation.get("parameters", ()))),
        *_body(operation.get("requestBody")),
        *_responses(operation["responses"]),
    ]
    return _details(f"{method}-{path}", head, parts)


def _parameter(parameter: Schema) -> tuple[str, str, str]:
    name = parameter["name"] + ("" if parameter.get("required") else "?")
    meaning = f"In the {parameter['in']}. {parameter.get('description', '')}"
    return name, type_html(parameter.get("schema", {})), meaning


def _body(body: Schema | None) -> Iterator[str]:
    for media_type, content in (body or {}).get("content", {}).items():
        yield f"<h3>Body</h3><p>{escape(media_type)}: {type_html(content.get('schema', {}))}</p>"
        yield from _example(content)


def _responses(answers: Schema) -> Iterator[str]:
    """Yield the responses; those that are problem documents are listed together on one line."""
    problems = []
    for status, answer in answers.items():
        contents = answer.get("content", {})
        if contents.keys() == {"application/problem+json"}:
            problems.append(f"{escape(status)} {inline_html(answer['description'])}")
            continue
        yield f"<h3>{escape(status)}</h3><p>{inline_html(answer['description'])}</p>"
        for media_type, content in contents.items():
            yield f"<p>{escape(media_type)}: {type_html(content.get('schema', {}))}</p>"
            yield from _example(content)
    if problems:
        yield f"<h3>Problem documents</h3><p>{'; '.join(sorted(problems))}</p>"


def _example(content: Schema) -> Iterator[str]:
    examples = [content["example"]] if "example" in content else content.get("schema", {}).get("examples", [])
    for example in examples:
        text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
        yield f"<pre tabindex=0>{escape(text)}</pre>"


def _type(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    fields = (
        (field if field in required else f"{field}?", type_html(inner), inner.get("description", ""))
        for field, inner in schema.get("properties", {}).items()
    )
    parts = [*_paragraphs(schema.get("description", "")), *_table("Field", fields)]
    return _details(f"type-{name}", f"<code>{escape(name)}</code>", parts)


def type_html(schema: Schema) -> str:
    """Return the type as HTML text, with links to types described on the page."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(type_html(inner) for inner in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"({', '.join(type_html(inner) for inner in schema['prefixItems'])})"
    if schema.get("type") == "array":
        return f"list of {type_html(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_html(schema['additionalProperties'])}"
    return escape(schema.get("type", "anything"))


def _table(head: str, rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a table of name, type (HTML) and meaning; nothing if there are no rows."""
    lines = [
        f"<tr><th scope=row><code>{escape(name)}</code><td>{kind}<td>{inline_html(meaning)}"
        for name, kind, meaning in rows
    ]
    if lines:
        yield f"<table><thead><tr><th>{head}<th>Type<th>Meaning</thead><tbody>{''.join(lines)}</tbody></table>"


def _details(anchor: str, head: str, parts: Iterable[str]) -> str:
    """Return a collapsible section. The anchor is inside, so a link to it expands the section."""
    return f'<details><summary>{head}</summary><div id="{escape(anchor)}">{"".join(parts)}</div></details>'


def _paragraphs(text: str) -> Iterator[str]:
    return (f"<p>{inline_html(part)}</p>" for part in text.split("\n\n") if part.strip())


def inline_html(text: str) -> str:
    """Escape plain text; backticks mark code."""
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text))


ROOT = "../../"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")


@router.get("/docs/runbooks/")
async def index() -> Response:
    items = (f'<li><a href="{escape(name)}">{escape(name)}</a></li>' for name in SECTIONS)
    return _document("Runbooks", *paragraphs(INTRODUCTION), "<ul>", *items, "</ul>")


@router.get("/docs/runbooks/{name}")
async def runbook(name: str) -> Response:
    text = SECTIONS.get(name.lower())
    if text is None:
        return problem(404, f"there is no runbook {name[:80]!r}; /docs/runbooks/ lists them")
    return _document(f"Runbook: {name.lower()}", *paragraphs(text), '<p><a href="./">All runbooks</a></p>')


def _document(title: str, *parts: str) -> Response:
    text = "\n".join((_head(title, ROOT), *parts, END))
    return Response(text, media_type="text/html; charset=utf-8", headers=HEADERS)


def paragraphs(text: str) -> Iterator[str]:
    """Convert paragraphs, lists, tables and blocks of code, with bold words and links to sections of the document."""
    for index, part in enumerate(text.split("```\n")):
        if index % 2:
            yield f"<pre tabindex=0>{escape(part)}</pre>"
            continue
        for paragraph in filter(str.strip, part.split("\n\n")):
            bold = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", inline_html(paragraph.strip()))
            yield _block(LINK.sub(_link, bold))


def _block(text: str) -> str:
    if text.startswith("- "):
        items = text[2:].split("\n- ")
        return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
    if text.startswith("| "):
        head, _, *rows = (line.strip("| ").split(" | ") for line in text.splitlines())
        return (
            f"<table><thead>{_row('th', head)}</thead><tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"
        )
    return f"<p>{text}</p>"


def _row(kind: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{cell}</{kind}>' for cell in cells)}</tr>"


def _link(found: re.Match[str]) -> str:
    text, target = found.groups()
    return f'<a href="{target[1:]}">{text}</a>' if target.startswith("#") else text


def file_response(scope: Scope, file: File) -> Response:
    compressed = accepts(header(scope["headers"], b"accept-encoding"), "gzip")
    etag = f'"{file.etag}-gzip"' if compressed else f'"{file.etag}"'
    headers = HEADERS | {"Cache-Control": file.cache, "ETag": etag}
    if header(scope["headers"], b"if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if compressed:
        return Response(file.compressed, 200, headers | {"Content-Encoding": "gzip"}, file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)


async def page(request: Request) -> Response:
    return file_response(request.scope, FILES[request.scope["route"].path])


for path in FILES:
    router.add_api_route(path, page)


@router.get("/docs")
async def docs(request: Request) -> Response:
    state = request.app.state
    if not hasattr(state, "reference"):  # the routes do not change while the daemon runs
        state.reference = file(reference_page(request.app.openapi()).encode(), "text/html")
    return file_response(request.scope, state.reference)
