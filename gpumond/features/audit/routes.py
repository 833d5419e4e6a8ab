"""GET /api/v1/audit: the audit log of changes and flushes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from gpumond.facts.flush import OPERATION_ID
from gpumond.serve import examples
from gpumond.serve.resources import streamed_json
from gpumond.serve.routes import Router, core_of
from gpumond.store.audit import AuditEntry

router = Router("facts")


@router.read(
    "/audit", "Audit log of changes and flushes, most recent last", list[AuditEntry], [examples.AUDIT_ENTRY], (503,)
)
async def audit(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100_000)] = 1000,
    operation: Annotated[
        str | None, Query(pattern=OPERATION_ID, description="Only entries of the operation with this ID.")
    ] = None,
) -> Response:
    """Returns the latest entries, at most 4 MiB."""
    entries = await core_of(request).store.audit_entries(limit, operation=operation)
    return streamed_json(request, AuditEntry, entries)
