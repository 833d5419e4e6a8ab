"""HTTP API of rules: read, create, replace, delete, and preview on the last hour."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, HTTPException, Request
from fastapi.responses import Response

from gpumond.facts.alerts import as_resolved
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.evaluation import Preview
from gpumond.features.rules.registry import OverriddenField, RuleEntry, RuleRegistry, RulesPart
from gpumond.features.rules.settings import OverrideConfig, RuleConfig, rule_body
from gpumond.serve import examples
from gpumond.serve.authentication import counted_user
from gpumond.serve.authorization import require_rules
from gpumond.serve.limits import MAX_PREVIEWS
from gpumond.serve.responses import problem
from gpumond.serve.routes import Router, core_of, etag_of, json_response, route_arguments

router = Router("rules")

BUILT_IN_BODY = rule_body(BUILT_IN[0])
EXAMPLE_BODY = {
    "name": "large-training",
    "scope": "workload",
    "value": "held_bytes",
    "above": 2 << 30,
    "for": 10,
    "match": {"workload": "training"},
    "labels": {"severity": "info"},
    "annotations": {"summary": "{workload} holds {held}, {live} of it in use"},
}
EXAMPLE_ENTRY = RuleEntry("large-training", "api", "0c5f2a7d9b1e4c3a", EXAMPLE_BODY)
EXAMPLE_PREVIEW = Preview(
    from_at=examples.TAKEN_AT - 3600,
    to_at=examples.TAKEN_AT,
    resolution_seconds=30.0,
    snapshots=120,
    omitted=0,
    fired=(as_resolved(examples.ALERT, examples.TAKEN_AT),),
)

IfMatch = Annotated[str | None, Header(description="The expected ETag of the rule; 412 if it has changed.")]


def _registry(request: Request) -> RuleRegistry:
    return core_of(request).get(RuleRegistry)


def entry_response(entry: RuleEntry, status: int = 200) -> Response:
    headers = {"ETag": f'"{entry.etag}"', "Location": f"/api/v1/rules/{entry.name}"}
    return json_response(RuleEntry, entry, status, headers)


@router.read("/rules", "Rules, with their origin and overrides", list[RuleEntry], [EXAMPLE_ENTRY])
async def rules(request: Request) -> Response:
    return json_response(list[RuleEntry], _registry(request).entries())


@router.read("/rules/{name}", "One rule, with its ETag", RuleEntry, EXAMPLE_ENTRY, (404,))
async def rule(request: Request, name: str) -> Response:
    return entry_response(_registry(request).get(name))


@router.change("POST /rules", "Create a rule", RuleEntry, EXAMPLE_ENTRY, (409, 422, 503, 507), status=201)
async def create(request: Request, body: RuleConfig, by: str = Depends(require_rules)) -> Response:
    return entry_response(await _registry(request).put(body.rule(), by, must_be_new=True), 201)


@router.change("PUT /rules/{name}", "Create or replace a rule", RuleEntry, EXAMPLE_ENTRY, (409, 412, 422, 503, 507))
async def replace(
    request: Request, name: str, body: RuleConfig, if_match: IfMatch = None, by: str = Depends(require_rules)
) -> Response:
    if body.name != name:
        raise HTTPException(422, f"body.name: {body.name!r} differs from the name in the path, {name!r}")
    return entry_response(await _registry(request).put(body.rule(), by, etag_of(if_match)))


@router.deletion("/rules/{name}", "Delete a rule", (404, 409, 412, 503, 507))
async def remove(request: Request, name: str, if_match: IfMatch = None, by: str = Depends(require_rules)) -> Response:
    await _registry(request).delete(name, by, etag_of(if_match))
    return Response(status_code=204)


@router.post(
    "/rules/preview",
    summary="Find out when a rule would have fired in the last hour",
    **route_arguments(Preview, EXAMPLE_PREVIEW, 422, 429, 503),
)
async def preview(request: Request, body: RuleConfig) -> Response:
    """Evaluates a rule on one snapshot every 30 s. `from_at` is the start of the available data.

    429, 503: previews are in progress; retry in a second.
    """
    previews, user, request_id = request.app.state.previews, counted_user(request.scope), object()
    if not previews.admits(user):
        is_own = previews.used_by(user)
        status, active = (429, "a preview by this user is") if is_own else (503, f"{MAX_PREVIEWS} previews are")
        return problem(status, f"{active} already in progress; retry in a second", {"Retry-After": "1"})
    previews.add(user, request_id)
    try:
        result = await core_of(request).get(RulesPart).preview(body.rule())
    finally:
        previews.remove(user, request_id)
    return json_response(Preview, result)


EXAMPLE_OVERRIDE = RuleEntry(
    BUILT_IN_BODY["name"],
    "built-in",
    "7d9b1e4c3a0c5f2a",
    {**BUILT_IN_BODY, "above": 0.9, "clear": 0.88},
    overrides={"threshold": OverriddenField("api", 0.9, 0.97)},
)


@router.change(
    "PUT /rules/{name}/override",
    "Override fields of a built-in rule",
    RuleEntry,
    EXAMPLE_OVERRIDE,
    (404, 409, 412, 422, 503, 507),
)
async def override(
    request: Request, name: str, body: OverrideConfig, if_match: IfMatch = None, by: str = Depends(require_rules)
) -> Response:
    """Replaces the whole earlier override. 409: the rule isn't built in, or the configuration file overrides one of
    the fields.
    """
    try:
        for rule in BUILT_IN:
            if rule.name == name:
                body.check(rule)
    except ValueError as error:
        raise HTTPException(422, f"body.{error}") from None
    return entry_response(await core_of(request).get(RuleRegistry).override(name, body.fields(), by, etag_of(if_match)))


@router.deletion("/rules/{name}/override", "Restore the defaults of a built-in rule", (404, 412, 503, 507))
async def restore(request: Request, name: str, if_match: IfMatch = None, by: str = Depends(require_rules)) -> Response:
    await _registry(request).restore(name, by, etag_of(if_match))
    return Response(status_code=204)
