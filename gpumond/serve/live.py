"""GET /api/v1/live: a stream of frames."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from gpumond.serve import examples
from gpumond.serve.live_frames import WHOLE
from gpumond.serve.pages import live_stream
from gpumond.serve.problems import responses
from gpumond.serve.resources import EXAMPLE_FRAME
from gpumond.serve.streams import EVENTS

router = APIRouter(prefix="/api/v1", tags=["facts"])

_OK: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Messages `frame` and `changes`",
        "content": {
            "text/event-stream": {
                "example": f"event: frame\ndata: {WHOLE.dump_json(EXAMPLE_FRAME).decode()[:-1]},"
                f'"events":{EVENTS.dump_json([examples.EVENT]).decode()}}}\n\n'
            }
        },
    },
}


@router.get("/live", summary="Stream of frames", response_class=StreamingResponse, responses=_OK | responses(503))
async def live(request: Request) -> Response:
    """Sends the current frame as the message `frame`, then one message `changes` for each later frame.

    `frame` is the response of `/frame`, with the newest `events`; `processes` of its devices are empty where they are
    known. `changes` contain: `values`, by path in the frame, which replace the previous ones; `tables`, by path;
    `events`, the new ones. A table's `rows` state for each row its place in the previous table, or -1 for one of
    `added`; without `rows` they are unchanged. Its `cells` contain, by field, places of rows and their new values.

    A reader that is too slow receives a `frame` again. Above 256 streams, the oldest stream of the user with the most
    streams ends.
    """
    return live_stream(request.scope, request.app.state)
