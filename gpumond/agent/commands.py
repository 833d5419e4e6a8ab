"""What an administrator may ask of a program beside a flush: a soft quota if the program allows it, and the
framework's own memory snapshot. Carried out in the agent's thread."""

from __future__ import annotations

from gpumond.agent.instrument import limits, snapshots
from gpumond.protocol.messages import AgentRequest, AgentResponse

REFUSED = "this program does not allow it; it does with gpumond.agent.start(allow_limit=True) or GPUMOND_ALLOW_LIMIT=1"


def answers(allow_limit: bool) -> tuple[str, ...]:
    """The kinds of Ask that are not refused."""
    return ("limit", "snapshot") if allow_limit else ("snapshot",)


class CommandHandler:
    def __init__(self) -> None:
        self._snapshots = snapshots.Asked()

    def answer(self, ask: AgentRequest, workload: str, allow_limit: bool) -> AgentResponse:
        """Never raises."""
        if ask.kind == "snapshot":
            dump = self._snapshots.write(workload)
            return AgentResponse(ask.id, dump.reason, dump=dump)
        if not allow_limit:
            return AgentResponse(ask.id, REFUSED)
        if ask.limit_bytes == 0:
            return AgentResponse(ask.id, "a limit of 0 bytes would be none to some allocators, and the end to others")
        applied = limits.apply(ask.limit_bytes, ask.device_uuid)
        refused = "; ".join(one.reason for one in applied if not one.applied)
        reason = "" if any(one.applied for one in applied) else refused or "the program uses no allocator that is known"
        return AgentResponse(ask.id, reason[:256], applied)
