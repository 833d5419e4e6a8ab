"""What routes share: FastAPI's dependencies, and errors as RFC 9457 problem documents.

What requires a caller is in `gpumond.serve.authorization`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from operator import itemgetter
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from gpumond.config.loading import keys_in, model_at
from gpumond.config.models import expectation
from gpumond.core import Core
from gpumond.facts.errors import (
    UNKNOWN_PATH_PREFIX,
    AmbiguousDevice,
    ConfigError,
    CooldownActive,
    EntryChanged,
    EntryConflict,
    FlushInProgress,
    NoSuchDevice,
    NoSuchEntry,
    NoSuchTarget,
    StoreUnavailable,
    TooManyAdmissions,
    did_you_mean,
)
from gpumond.facts.frame import Frame
from gpumond.facts.units import list_text
from gpumond.serve.responses import INTERNAL_ERROR, problem
from gpumond.store.table import type_adapter


def core_of(request: Request) -> Core:
    """Return the daemon's core, typed: attributes of ``app.state`` are not."""
    core: Core = request.app.state.core
    return core


def require_frame(frame: Frame | None) -> Frame:
    """Return the frame. Raises 503 before the first one."""
    if frame is None:
        raise not_ready()
    return frame


def not_ready() -> HTTPException:
    """Return the error of a request before the first reading."""
    return HTTPException(503, "the first reading is in progress; retry in a second", {"Retry-After": "1"})


bearer = HTTPBearer(
    auto_error=False,
    description="The token in the file `token` of the daemon's runtime directory, a token of `tokens_file` that has "
    "the required scope, or that of a Kubernetes service account which `tokens_file` names.",
)
F = TypeVar("F", bound=Callable[..., Any])
BODY_TYPE_KEY = "kind"
"""Key of a response for the type of its body. FastAPI would make its schema from ``model`` at each start."""


class Router(APIRouter):
    """Routes, documented in OpenAPI: each has the type of its answer, an example, and the statuses of its problems."""

    def __init__(self, tag: str, prefix: str = "/api/v1") -> None:
        super().__init__(prefix=prefix, tags=[tag])

    def read(self, path: str, summary: str, kind: Any, example: Any, problems: Iterable[int] = ()) -> Callable[[F], F]:
        """Return the decorator of a route for GET."""
        return self.get(path, summary=summary, **route_arguments(kind, example, *problems))

    def change(
        self, request: str, summary: str, kind: Any, example: Any, problems: Iterable[int] = (), status: int = 200
    ) -> Callable[[F], F]:
        """Return the decorator of a route that modifies state and so requires a token. ``request``: method and path."""
        method, _, path = request.partition(" ")
        answer = route_arguments(kind, example, 401, 403, *problems, status=status)
        return self.api_route(path, methods=[method], summary=summary, dependencies=[Depends(bearer)], **answer)

    def deletion(self, path: str, summary: str, problems: Iterable[int]) -> Callable[[F], F]:
        """Return the decorator of a route that deletes something, and answers 204."""
        return self.delete(
            path,
            summary=summary,
            dependencies=[Depends(bearer)],
            status_code=204,
            response_model=None,
            responses=problem_responses(401, 403, *problems),
        )


def route_arguments(kind: Any, example: Any, *problems: int, status: int = 200) -> dict[str, Any]:
    """Return the keyword arguments of a route: type and example of its answer, and its problems."""
    content = {"application/json": {"example": to_jsonable_python(example)}}
    return {
        "response_model": None,
        "status_code": status,
        "responses": {status: {BODY_TYPE_KEY: kind, "content": content}, **problem_responses(*problems)},
    }


def json_response(kind: Any, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(type_adapter(kind).dump_json(value), status, headers, media_type="application/json")


def etag_of(if_match: str | None) -> str | None:
    return None if if_match in (None, "*") else if_match.strip().removeprefix("W/").strip('"')


STATUS_OF_ERROR: dict[type[Exception], int] = {
    NoSuchTarget: 404,
    NoSuchDevice: 404,
    NoSuchEntry: 404,
    FlushInProgress: 409,
    EntryConflict: 409,
    EntryChanged: 412,
    AmbiguousDevice: 422,
    ConfigError: 422,
    CooldownActive: 429,
    TooManyAdmissions: 429,
}


class Problem(BaseModel):
    """Cause of an error, and its remedy."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


PROBLEM_SCHEMA = Problem.model_json_schema()
MAX_PATH_LENGTH = 200
"""Characters of a requested path that the detail of a problem repeats."""


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses for the problems of a route."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {"application/problem+json": {"schema": PROBLEM_SCHEMA}},
        }
        for status in statuses
    }


def allowed_methods(request: Request) -> set[str]:
    """Return the methods that a path allows. The router reports only those of the first matching route."""
    documented = request.app.openapi()["paths"].items()
    matching = [
        (path.count("{"), set(methods))
        for path, methods in documented
        if compile_path(path)[0].match(request.scope["path"])
    ]
    methods = {method.upper() for method in min(matching, key=itemgetter(0), default=(0, ()))[1]}
    return methods | ({"HEAD"} if "GET" in methods else set())


def _location_text(error: Mapping[str, Any]) -> str:
    """Return where a request is wrong, such as ``body.target.pid`` and ``query parameter uuid``."""
    kind, *path = (str(part) for part in error["loc"])
    if kind == "body":
        return kind if error["type"] == "json_invalid" else ".".join((kind, *path))
    return f"{kind} parameter {'.'.join(path)}"


def _expectation_text(request: Request, error: Mapping[str, Any]) -> str:
    """Return what is expected there. For an unknown key of a body: the one that it may mean, or else all of them."""
    if error["type"] == "missing":
        return "required, but not given"
    field = getattr(request.scope.get("route"), "body_field", None)
    root = getattr(getattr(field, "field_info", None), "annotation", None)
    if error["type"] != "extra_forbidden" or not (isinstance(root, type) and issubclass(root, BaseModel)):
        return expectation(error)
    known = keys_in(model_at(root, error["loc"][1:]))
    hint = did_you_mean(str(error["loc"][-1]), known) or f"; expected one of {', '.join(known)}"
    return f"{expectation(error)}{hint}"


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        headers, detail, path = dict(error.headers or {}), str(error.detail), request.url.path[:MAX_PATH_LENGTH]
        if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:  # the router's own answer
            detail = f"{UNKNOWN_PATH_PREFIX} {path}; /docs lists what it serves"
        if error.status_code == 405 and (methods := allowed_methods(request)):
            headers["Allow"] = ", ".join(sorted(methods))
            detail = f"{path} doesn't accept {request.method}; it accepts {list_text(sorted(methods))}"
        return problem(error.status_code, detail, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return problem(422, f"{_location_text(first)}: {_expectation_text(request, first)}")

    async def refused(request: Request, error: Exception) -> Response:
        headers = {"Retry-After": f"{error.retry_after_seconds:.0f}"} if isinstance(error, CooldownActive) else None
        return problem(STATUS_OF_ERROR[type(error)], str(error), headers)

    for kind in STATUS_OF_ERROR:
        app.add_exception_handler(kind, refused)

    @app.exception_handler(StoreUnavailable)
    async def store_unavailable(request: Request, error: StoreUnavailable) -> Response:
        return problem(507 if error.full else 503, f"{error}; nothing was changed")

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return problem(500, INTERNAL_ERROR)
