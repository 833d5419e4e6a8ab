"""Requests of an administrator other than a flush: a soft quota if the program allows it, and the framework's own
memory snapshot. They are carried out in the agent's thread.
"""

from __future__ import annotations

from gpumond.agent.instrument import limits, snapshots
from gpumond.protocol.messages import AgentRequest, AgentResponse

REFUSED = (
    "this program does not allow limits from outside; allow them with gpumond.agent.start(allow_limit=True) or "
    "GPUMOND_ALLOW_LIMIT=1"
)


def answers(allow_limit: bool) -> tuple[str, ...]:
    """Return the kinds of AgentRequest that are not refused."""
    return ("limit", "snapshot") if allow_limit else ("snapshot",)


class CommandHandler:
    def __init__(self) -> None:
        self._snapshots = snapshots.RequestedSnapshots()

    def answer(self, request: AgentRequest, workload: str, allow_limit: bool) -> AgentResponse:
        """Carry out a request. Never raises."""
        if request.kind == "snapshot":
            dump = self._snapshots.write(workload)
            return AgentResponse(request.id, dump.reason, dump=dump)
        if not allow_limit:
            return AgentResponse(request.id, REFUSED)
        if request.limit_bytes == 0:
            return AgentResponse(
                request.id,
                "a limit of 0 bytes is ambiguous: to some allocators it means no limit; give at least 1 byte",
            )
        applied = limits.apply(request.limit_bytes, request.device_uuid)
        refused = "; ".join(result.reason for result in applied if not result.applied)
        reason = "" if any(result.applied for result in applied) else refused or "the program uses no known allocator"
        return AgentResponse(request.id, reason[:256], applied)
