"""Many requests to flush a program: by another user, its owner, an administrator."""

from __future__ import annotations

from collections import Counter

import pytest

from gpumond.facts.flush import FlushOutcome, FlushRequest
from gpumond.facts.messages import FlushCommand, FlushResult
from gpumond.host.peer import Identity
from gpumond.serve.limits import FLUSHES_PER_MINUTE
from tests.helpers.agents import GIB
from tests.helpers.scripted_programs import ScriptedPrograms, release_all
from tests.helpers.values import make_pool, make_report
from tests.serve.application import View
from tests.serve.guarded import ADMIN, GuardedApi, bearer

OWNER, OTHER = 1001, 1002
REQUESTS = 5 * FLUSHES_PER_MINUTE


class FlushingView(View):
    """View with a real flusher for a program of one user, which records its requests."""

    def __init__(self) -> None:
        super().__init__()
        report = make_report(7, (make_pool(live=GIB, cached=2 * GIB),), uid=OWNER)
        self.scripted = ScriptedPrograms(report, respond=self.flushed)
        self.flusher = self.scripted.flusher()
        self.stalls = 0

    def flushed(self, scripted: ScriptedPrograms, identity: Identity, request: FlushCommand) -> FlushResult | None:
        self.stalls += 1
        return release_all(scripted, identity, request)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome:
        self.flush_requests.append(request)
        return await self.flusher.flush(request, requested_by)


def send_many(api: GuardedApi, uid: int | None, headers: dict[str, str]) -> Counter[int]:
    target = {"target": {"pid": 7}}
    return Counter(
        api.ask("POST", "/api/v1/flushes", uid, headers=headers, json=target).status_code for _ in range(REQUESTS)
    )


@pytest.mark.parametrize(
    ("uid", "headers", "first", "stalls"),
    [
        (OTHER, {}, 404, 0),
        (OWNER, {}, 200, 1),
        (None, bearer("gpm_flusher"), 200, 1),
        (None, ADMIN, 200, 1),
        (None, bearer("gpm_reader"), 403, 0),
    ],
    ids=["another user", "its owner", "a token", "an administrator", "a reader"],
)
def test_program_is_stalled_once_at_most(uid: int | None, headers: dict[str, str], first: int, stalls: int):
    api = GuardedApi(view=FlushingView())
    answers = send_many(api, uid, headers)
    flush_requests = 0 if first == 403 else FLUSHES_PER_MINUTE  # each of these is in the audit
    assert len(api.view.flush_requests) == flush_requests
    assert api.view.stalls == stalls
    assert answers[first] == (REQUESTS if first == 403 else flush_requests if first == 404 else 1)
    assert sum(answers.values()) - answers[first] == answers[429]
