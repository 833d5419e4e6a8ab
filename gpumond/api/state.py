"""State that the routes of one application share."""

from __future__ import annotations

from starlette.datastructures import State

from gpumond.api.auth import Tokens
from gpumond.api.live_frames import LiveFrames
from gpumond.api.rate_limits import MAX_PREVIEWS
from gpumond.api.shares import Shares
from gpumond.api.streams import MAX_STREAMS, SLOW_SECONDS
from gpumond.api.view import DaemonView


def state_of(view: DaemonView, tokens: Tokens) -> State:
    return State(
        {
            "view": view,
            "tokens": tokens,
            "live": LiveFrames(view),
            "event_streams": Shares(MAX_STREAMS),
            "previews": Shares(MAX_PREVIEWS, 1),
            "slow_seconds": SLOW_SECONDS,
        }
    )
