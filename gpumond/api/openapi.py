"""Additions to the OpenAPI document: problems that apply to all routes with a body, a token or parameters."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from gpumond.api.problems import responses

BODY_PROBLEMS = (400, 413, 415)
TOKEN_PROBLEMS = (401, 403, 429)
PARAMETER_PROBLEMS = (422,)
UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")
"""Schemas that FastAPI documents for 422 and that are not used in responses."""


def install(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            for methods in document["paths"].values():
                for operation in methods.values():
                    _complete(operation)
            for name in UNUSED_SCHEMAS:
                document["components"]["schemas"].pop(name, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: dict[str, Any]) -> None:
    body, token = "requestBody" in operation, "security" in operation
    refusals = (*(BODY_PROBLEMS if body else ()), *(TOKEN_PROBLEMS if token else ()))
    if body or "parameters" in operation:
        refusals += PARAMETER_PROBLEMS
    for status, response in responses(*refusals).items():
        operation["responses"][str(status)] = response
