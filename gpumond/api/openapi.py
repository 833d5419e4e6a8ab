"""What OpenAPI says of refusals that no route spells out: of a body, of a token, of a parameter. All are problems."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from gpumond.api.problems import responses

OF_A_BODY = (400, 413, 415)
OF_A_TOKEN = (401, 403, 429)
OF_A_PARAMETER = (422,)
FRAMEWORKS = ("HTTPValidationError", "ValidationError")
"""What FastAPI documents for a 422, and is not what is answered."""


def install(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            for methods in document["paths"].values():
                for operation in methods.values():
                    _complete(operation)
            for name in FRAMEWORKS:
                document["components"]["schemas"].pop(name, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: dict[str, Any]) -> None:
    body, token = "requestBody" in operation, "security" in operation
    refusals = (*(OF_A_BODY if body else ()), *(OF_A_TOKEN if token else ()))
    if body or "parameters" in operation:
        refusals += OF_A_PARAMETER
    for status, response in responses(*refusals).items():
        operation["responses"][str(status)] = response
