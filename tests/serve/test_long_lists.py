"""Lists with more entries than one step writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpumond.serve.examples import AUDIT_ENTRY
from gpumond.serve.resources import ENTRIES_AT_ONCE
from gpumond.store.audit import AuditEntry
from tests.serve.application import AuditedStore, View, ask


class LongAudit(AuditedStore):
    async def audit_entries(self, limit: int = 0, users: bool = True, operation: str | None = None) -> list[AuditEntry]:
        return [replace(AUDIT_ENTRY, seq=number) for number in range(limit)]


@pytest.mark.parametrize("count", [1, ENTRIES_AT_ONCE, ENTRIES_AT_ONCE + 1, 3 * ENTRIES_AT_ONCE])
def test_all_entries_of_a_long_list_are_written(count: int):
    view = View()
    view.store = LongAudit()
    answer = ask(view, f"/api/v1/audit?limit={count}")
    assert answer.headers["content-type"] == "application/json"
    assert [entry["seq"] for entry in json.loads(answer.content)] == list(range(count))
