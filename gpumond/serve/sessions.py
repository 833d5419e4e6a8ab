"""HTTP API of sessions: `gpumond open` requests a code, and the page exchanges it for a token."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from gpumond.config.models import EncodableModel
from gpumond.serve.authentication import (
    MAX_SIGN_IN_CODE_SECONDS,
    SESSION_SECONDS,
    SESSIONS_ROUTE,
    SIGN_IN_CODE_SECONDS,
    Caller,
    Tokens,
    bearer_token,
    check_rate,
    count_failure,
    counted_user,
)
from gpumond.serve.authorization import caller_with
from gpumond.serve.routes import Router, json_response, route_arguments

router = Router("sessions", prefix="")


@dataclass(frozen=True, slots=True)
class SignInCode:
    """A code for one sign-in."""

    code: str
    valid_seconds: float


@dataclass(frozen=True, slots=True)
class Session:
    """A token with the rights of the caller that requested the code."""

    token: str
    valid_seconds: float


class CodeRequest(EncodableModel):
    """``valid_seconds``: time until the code expires."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{}]})

    valid_seconds: float = Field(default=SIGN_IN_CODE_SECONDS, ge=1, le=MAX_SIGN_IN_CODE_SECONDS)


class CodeBody(EncodableModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"code": "gpm_9hXk"}]})

    code: str = Field(min_length=1, max_length=128)


NO_STORE = {"Cache-Control": "no-store"}


@router.change(
    f"POST {SESSIONS_ROUTE}/code",
    "Request a one-time code that signs a browser in",
    SignInCode,
    SignInCode("gpm_9hXk", SIGN_IN_CODE_SECONDS),
    (422,),
)
async def request_code(
    request: Request, body: CodeRequest | None = None, caller: Caller = Depends(caller_with("read"))
) -> Response:
    """Returns a code for the web UI's address, `/#code=CODE`. The code works once, within 60 s or `valid_seconds`.

    403: you used a client certificate or a service account's token.
    """
    tokens: Tokens = request.app.state.tokens
    if not caller.allows_sessions:
        raise HTTPException(403, f"{caller.name} can't have a session; use a gpumond token")
    seconds = SIGN_IN_CODE_SECONDS if body is None else body.valid_seconds
    code = tokens.sign_ins.create_code(caller, bearer_token(request.scope), tokens.clock(), seconds)
    return json_response(SignInCode, SignInCode(code, seconds), headers=NO_STORE)


@router.post(
    SESSIONS_ROUTE,
    summary="Exchange a one-time code for a session token",
    **route_arguments(Session, Session("gpm_fJ2c", SESSION_SECONDS), 401, 429),
)
async def sign_in(request: Request, body: CodeBody) -> Response:
    """The token has the rights of the caller who requested the code. It ends after 12 h, when the daemon stops, or when
    that caller's own token is revoked.

    401: the code doesn't exist, has expired, or was used before. 429: ten wrong codes or tokens within a minute.
    """
    tokens: Tokens = request.app.state.tokens
    user, now = counted_user(request.scope), tokens.clock()
    check_rate(tokens.failure_rate, user, now, "too many wrong codes")
    token = tokens.sign_ins.exchange(body.code, now)
    if token is None:
        count_failure(tokens, user)
        raise HTTPException(401, "the code is wrong, has expired, or was used before; run `gpumond open` again")
    return json_response(Session, Session(token, SESSION_SECONDS), headers=NO_STORE)


@router.deletion(SESSIONS_ROUTE, "End the session whose token is sent", (404,))
async def sign_out(request: Request, caller: Caller = Depends(caller_with("read"))) -> Response:
    """404: the token doesn't belong to a session."""
    tokens: Tokens = request.app.state.tokens
    if not tokens.sign_ins.end_session(bearer_token(request.scope) or ""):
        raise HTTPException(404, "the token doesn't belong to a session; only sessions can be ended")
    return Response(status_code=204)
