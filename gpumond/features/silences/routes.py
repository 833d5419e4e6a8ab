"""HTTP API of silences: read, create, end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, field_validator, model_validator

from gpumond.config.models import EncodableModel
from gpumond.facts.frame import Matcher, Operator, Silence, SilenceState
from gpumond.facts.units import has_control_characters
from gpumond.features.silences.silences import MAX_SECONDS, Silences
from gpumond.serve import examples
from gpumond.serve.authentication import count_at_rate
from gpumond.serve.authorization import require_rules
from gpumond.serve.routes import Router, core_of, json_response

router = Router("silences")

MAX_MATCHERS, MAX_VALUE_CHARACTERS = 8, 256

EXAMPLE_BODY: dict[str, Any] = {
    "matchers": [
        {"name": "rule", "operator": "=", "value": "leak"},
        {"name": "workload", "operator": "=~", "value": "train.*"},
    ],
    "for_seconds": 3600,
    "reason": "known leak, fixed on Monday",
}

SilenceId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="The silence's ID.")]


@dataclass(frozen=True, slots=True)
class SilenceEntry:
    """One silence and its state."""

    state: SilenceState
    silence: Silence


@dataclass(frozen=True, slots=True)
class CreatedSilence:
    """A new silence, its state, and the number of present alerts that it matches, `null` before the first tick."""

    state: SilenceState
    silence: Silence
    alerts: int | None


def _printable(text: str) -> str:
    if has_control_characters(text):
        raise ValueError(f"{text!r:.40} has a control character, such as a newline; remove it")
    return text


class MatcherBody(EncodableModel):
    """A condition on one label of an alert, or on `rule`, the name of its rule."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$", max_length=64, description="A label, or `rule`.")
    operator: Operator = Field(description="`=~` and `!~` match the whole text with a regular expression.")
    value: str = Field(max_length=MAX_VALUE_CHARACTERS)

    _check_value = field_validator("value")(_printable)


class SilenceBody(EncodableModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [EXAMPLE_BODY]})

    matchers: list[MatcherBody] = Field(
        min_length=1, max_length=MAX_MATCHERS, description="An alert must match all of them."
    )
    starts_at: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="By default now.")
    ends_at: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    for_seconds: float | None = Field(
        default=None, gt=0, le=MAX_SECONDS, description="The time from the start to the end, instead of `ends_at`."
    )
    author: str = Field(default="", max_length=128, description="By default the name of the caller.")
    reason: str = Field(min_length=1, max_length=512)

    _check_texts = field_validator("author", "reason")(_printable)

    @model_validator(mode="after")
    def _complete(self) -> SilenceBody:
        if (self.ends_at is None) == (self.for_seconds is None):
            raise ValueError("pass exactly one of ends_at and for_seconds")
        if not self.reason.strip():
            raise ValueError("reason must not be empty; pass, for example, a ticket number")
        return self


EXAMPLE_SILENCE = Silence(
    id="5b0e3a9c71d2f846",
    matchers=(Matcher("rule", "=", "leak"), Matcher("workload", "=~", "train.*")),
    starts_at=examples.TAKEN_AT,
    ends_at=examples.TAKEN_AT + 3600,
    author="token",
    reason="known leak, fixed on Monday",
    created_at=examples.TAKEN_AT,
    created_by="token",
)
EXAMPLE_ENTRY = SilenceEntry("active", EXAMPLE_SILENCE)
EXAMPLE_CREATED = CreatedSilence("active", EXAMPLE_SILENCE, 1)


def _silences(request: Request) -> Silences:
    return core_of(request).get(Silences)


def _count_change(request: Request, by: str) -> None:
    tokens = request.app.state.tokens
    count_at_rate(tokens, tokens.silence_rate, by, "too many silence changes by this caller")


@router.read("/silences", "Silences and their state, most recent last", list[SilenceEntry], [EXAMPLE_ENTRY])
async def silences(request: Request) -> Response:
    """Returns pending and active silences, and those that ended in the last five days (at most 100 per user)."""
    registry = _silences(request)
    entries = [SilenceEntry(registry.state(silence), silence) for silence in registry.all()]
    return json_response(list[SilenceEntry], entries)


@router.read("/silences/{id}", "One silence and its state", SilenceEntry, EXAMPLE_ENTRY, (404, 422))
async def silence(request: Request, id: SilenceId) -> Response:
    registry = _silences(request)
    silence = registry.get(id)
    return json_response(SilenceEntry, SilenceEntry(registry.state(silence), silence))


@router.change(
    "POST /silences", "Create a silence", CreatedSilence, EXAMPLE_CREATED, (409, 422, 429, 503, 507), status=201
)
async def create(request: Request, body: SilenceBody, by: str = Depends(require_rules)) -> Response:
    """Alerts that all matchers match aren't sent, and are shown with `silenced_by`.

    `author` can be any text; `created_by` names the authenticated caller. 409: you have 100 silences that haven't
    ended. 429: you have changed 30 silences within a minute.
    """
    _count_change(request, by)
    registry, frame = _silences(request), core_of(request).frame
    silence = await registry.add(
        [Matcher(each.name, each.operator, each.value) for each in body.matchers],
        author=body.author.strip(),
        by=by,
        **body.model_dump(include={"starts_at", "ends_at", "for_seconds", "reason"}),
    )
    alerts = None if frame is None else registry.count(silence, frame.alerts)
    headers = {"Location": f"/api/v1/silences/{silence.id}"}
    return json_response(CreatedSilence, CreatedSilence(registry.state(silence), silence, alerts), 201, headers)


@router.deletion("/silences/{id}", "End a silence", (404, 422, 429, 503, 507))
async def expire(request: Request, id: SilenceId, by: str = Depends(require_rules)) -> Response:
    """Ends a silence now. It stays in the list for five days."""
    _count_change(request, by)
    await _silences(request).expire(id, by)
    return Response(status_code=204)
