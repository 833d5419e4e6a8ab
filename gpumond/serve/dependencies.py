"""FastAPI's dependencies of routes. What requires a caller is in `gpumond.serve.authorization`."""

from __future__ import annotations

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPBearer

from gpumond.facts.frame import Frame
from gpumond.kernel import Kernel


def kernel_of(request: Request) -> Kernel:
    """Return the daemon's kernel, typed: attributes of ``app.state`` are not."""
    kernel: Kernel = request.app.state.kernel
    return kernel


def present(frame: Frame | None) -> Frame:
    """Return the frame. Raises 503 before the first one."""
    if frame is None:
        raise starting()
    return frame


def starting() -> HTTPException:
    """Return the error of a request before the first reading."""
    return HTTPException(503, "the first reading is in progress; retry in a second", {"Retry-After": "1"})


bearer = HTTPBearer(
    auto_error=False,
    description="The token in the file `token` of the daemon's runtime directory, a token of `tokens_file` that has "
    "the required scope, or that of a Kubernetes service account which `tokens_file` names.",
)
CHANGES = [Depends(bearer)]
"""Dependencies of routes that modify state."""


def etag_of(if_match: str | None) -> str | None:
    return None if if_match in (None, "*") else if_match.strip().removeprefix("W/").strip('"')
