"""/docs/runbooks/: a page for each alert."""

from __future__ import annotations

import re

import pytest

from gpumond.features.rules.built_in import BUILT_IN
from gpumond.page.files import POLICY
from tests.serve.application import View, ask
from tests.serve.docs_reader import Reader


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
