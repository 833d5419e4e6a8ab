"""Responses of the daemon conform to the OpenAPI document."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from tests.helpers import openapi_requests
from tests.serve.application import View, application, ask

EXAMPLES = 4


@pytest.mark.skipif(bool(openapi_requests.MISSING), reason=openapi_requests.MISSING)
@pytest.mark.timeout(300)
def test_responses_conform_to_the_openapi_document(tmp_path: Path):
    with openapi_requests.demo(tmp_path) as daemon:
        openapi_requests.ask_all(daemon, tmp_path, EXAMPLES, without_token=False)  # the soak test runs both


def test_routes_of_the_api_are_in_the_document_and_so_in_the_requests():
    """Except streams that do not end, and a release, which is requested last."""
    routes = [route for route in application().routes if isinstance(route, APIRoute)]
    served = {route.path for route in routes if route.path.startswith("/api/")}
    documented = set(ask(View(), "/openapi.json").json()["paths"])
    assert served - documented == set()
    assert {*openapi_requests.ENDLESS, openapi_requests.LAST} <= documented


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PATCH", "/api/v1/rules", "GET, HEAD, POST"),
        ("PATCH", "/api/v1/rules/leak", "DELETE, GET, HEAD, PUT"),
        ("PATCH", "/api/v1/rules/preview", "POST"),
        ("POST", "/api/v1/ledger", "GET, HEAD"),
        ("PUT", "/", "GET"),
    ],
)
def test_allow_header_lists_all_methods(method: str, path: str, allow: str):
    answer = ask(View(), path, method)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)


def test_documented_errors_are_problem_documents():
    document = ask(View(), "/openapi.json").json()
    for methods in document["paths"].values():
        for operation in methods.values():
            refusals = {status: answer for status, answer in operation["responses"].items() if status >= "4"}
            assert all(list(answer["content"]) == ["application/problem+json"] for answer in refusals.values())
            if "requestBody" in operation:
                assert {"400", "413", "415", "422"} <= refusals.keys()
            if "security" in operation:
                assert {"401", "403", "429"} <= refusals.keys()
    assert "HTTPValidationError" not in document["components"]["schemas"]
