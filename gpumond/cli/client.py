"""The daemon's HTTP API, from the command line. Not a verb: what the verbs talk through."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from gpumond.errors import DaemonError
from gpumond.wire import default_socket

DEFAULT_URL = "http://127.0.0.1:9917"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=os.environ.get("GPUMOND_URL", DEFAULT_URL), help=f"the daemon ($GPUMOND_URL, {DEFAULT_URL})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def get(url: str, path: str) -> Any:
    """The decoded answer. Raises DaemonError."""
    return _call(url, path, None, {}, 10.0)


def post(url: str, path: str, body: object, timeout: float) -> Any:
    """The same for a route that changes something: with the token of this user's daemon."""
    headers = {"Content-Type": "application/json"}
    token = _token()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return _call(url, path, json.dumps(body).encode(), headers, timeout)


def _call(url: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float) -> Any:
    if not url.startswith(("http://", "https://")):
        raise DaemonError(f"{url}: expected an http:// or https:// address")
    request = urllib.request.Request(url.rstrip("/") + path, body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the daemon is on this machine
    try:
        with opener.open(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DaemonError(
            f"no daemon answers at {url} ({reason}); start one with `gpumond serve`, or name it with --url"
        ) from None


def _refusal(error: urllib.error.HTTPError) -> DaemonError:
    try:
        problem = json.load(error)
        return DaemonError(str(problem["detail"]), error.code, problem)
    except (OSError, ValueError, KeyError, TypeError):
        return DaemonError(f"the daemon answered {error.code} {error.reason}", error.code)


def _token() -> str | None:
    """$GPUMOND_TOKEN, else the token that the daemon left beside the agents' socket for its own user."""
    if token := os.environ.get("GPUMOND_TOKEN"):
        return token
    path = os.environ.get("GPUMOND_SOCKET") or default_socket()
    if path is None:
        return None
    try:
        return (Path(path).parent / "token").read_text().strip()
    except OSError:
        return None
