"""PUT and DELETE /api/v1/rules/NAME/override: single fields of a built-in rule."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from gpumond.api import examples
from gpumond.api.dependencies import CHANGES, require_rules
from gpumond.api.problems import responses
from gpumond.api.rules import BODY, IfMatch, entry_response, etag_of
from gpumond.api.view import view_of
from gpumond.config.rule_registry import OverriddenField, RuleEntry
from gpumond.rules.config import OverrideConfig

router = APIRouter(prefix="/api/v1", tags=["rules"])

ENTRY = RuleEntry(
    BODY["name"],
    "built-in",
    "7d9b1e4c3a0c5f2a",
    {**BODY, "above": 0.9, "clear": 0.84375},
    overrides={"level": OverriddenField("api", 0.9, 0.8)},
)


@router.put(
    "/rules/{name}/override",
    summary="Override fields of a built-in rule",
    dependencies=CHANGES,
    **examples.described(RuleEntry, ENTRY, 401, 403, 404, 409, 412, 422, 503, 507),
)
async def override(
    request: Request, name: str, body: OverrideConfig, if_match: IfMatch = None, by: str = Depends(require_rules)
) -> Response:
    """Replaces all fields of an earlier override of the rule. 409: the configuration file overrides a field."""
    return entry_response(await view_of(request).rulebook.override(name, body.fields(), by, etag_of(if_match)))


@router.delete(
    "/rules/{name}/override",
    summary="Restore the defaults of a built-in rule",
    dependencies=CHANGES,
    status_code=204,
    response_model=None,
    responses=responses(401, 403, 404, 412, 503, 507),
)
async def restore(request: Request, name: str, if_match: IfMatch = None, by: str = Depends(require_rules)) -> Response:
    await view_of(request).rulebook.restore(name, by, etag_of(if_match))
    return Response(status_code=204)
