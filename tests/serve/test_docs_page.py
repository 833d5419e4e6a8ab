"""/docs: the whole API on one page without network access or scripts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpumond.features.rules.built_in import BUILT_IN
from gpumond.page.files import POLICY, STYLE
from gpumond.serve.pages import reference_page, type_html
from tests.serve.application import View, ask
from tests.serve.docs_reader import Reader


@pytest.fixture(scope="module")
def openapi() -> Any:
    return ask(View(), "/openapi.json").json()


@pytest.fixture(scope="module")
def read() -> Reader:
    return Reader(ask(View(), "/docs").text)


def test_docs_page_lists_each_operation_parameter_and_type(openapi: Any, read: Reader):
    anchors = read.all("id")
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()}-{path}" in anchors
            assert operation["summary"].replace("`", "") in read.text
            for parameter in operation.get("parameters", ()):
                assert parameter["name"] in read.text
    assert {f"type-{name}" for name in openapi["components"]["schemas"]} <= anchors
    assert '"released_bytes": 42949672960' in read.text


def test_links_have_targets_and_elements_are_closed(read: Reader):
    inside = {address.removeprefix("#") for address in read.all("href") if address.startswith("#")}
    assert len(inside) > 20
    assert inside <= read.all("id")
    assert {address for address in read.all("href") if not address.startswith("#")} == {
        "./",
        "docs",
        "docs/runbooks/",
        "metrics",
        "openapi.json",
        "docs.css",
        STYLE[1:],
        "data:,",
    }
    assert read.open == []


def test_docs_page_has_no_scripts_and_no_external_resources():
    answer = ask(View(), "/docs")
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<script|<style| style=| on\w+=|(?:src|href)=[\"']?https?://", answer.text)
    assert ask(View(), "/docs", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_descriptions_are_escaped():
    hostile = "<img src=x onerror=alert(1)> & `code`"
    operation = {"tags": [hostile], "summary": hostile, "description": hostile, "responses": {}}
    document = {
        "info": {"version": hostile, "description": hostile},
        "paths": {f"/{hostile}": {"get": operation}},
        "components": {"schemas": {hostile: {"description": hostile, "properties": {hostile: {"type": hostile}}}}},
    }
    read = Reader(reference_page(document))
    assert "img" not in {tag for tag, _ in read.elements}
    assert read.text.count("<img src=x onerror=alert(1)>") >= 7
    assert "code" in {tag for tag, _ in read.elements}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer"}, "integer"),
        ({}, "anything"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "number or null"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Line"}}, 'list of <a href="#type-Line">Line</a>'),
        ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}, "(string, number)"),
        ({"enum": ["a", "b"], "type": "string"}, "<code>a</code>, <code>b</code>"),
        ({"const": 1}, "<code>1</code>"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "object of string"),
    ],
)
def test_type_as_text(schema: Any, words: str):
    assert type_html(schema) == words


@pytest.mark.parametrize("name", [*(rule.name for rule in BUILT_IN), "daemon-down", "readings-stale", "Verdicts"])
def test_runbook_of_each_alert_is_a_page(name: str):
    answer = ask(View(), f"/docs/runbooks/{name}")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    page = Reader(answer.text)
    assert page.open == []
    assert f"Runbook: {name.lower()}" in page.text
    prose = Reader(re.sub(r"<(pre|code)\b.*?</\1>", "", answer.text, flags=re.DOTALL)).text
    assert not [mark for mark in ("**", "`", "](", "|", "\n- ") if mark in prose]
    for link in page.all("href") - {"data:,", "./", "../.././", "../../docs.css"}:
        assert ask(View(), f"/docs/runbooks/{link}").status_code == 200


def test_list_of_runbooks_links_to_each():
    page = Reader(ask(View(), "/docs/runbooks/").text)
    assert {rule.name for rule in BUILT_IN} <= page.all("href")


def test_address_without_a_slash_leads_to_the_list():
    answer = ask(View(), "/docs/runbooks")
    assert (answer.status_code, answer.headers["location"].rpartition("/docs")[2]) == (307, "/runbooks/")


@pytest.mark.parametrize("name", ["nothing", "..%2f..%2fpyproject.toml", "%3Cscript%3E"])
def test_unknown_runbook_is_not_found(name: str):
    answer = ask(View(), f"/docs/runbooks/{name}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
