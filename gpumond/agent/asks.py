"""What an administrator may ask of a program beside a flush: a soft quota if the program allows it, and the
framework's own memory snapshot. Carried out in the agent's thread."""

from __future__ import annotations

from gpumond.agent import limits, snapshots
from gpumond.wire import Answer, Ask

REFUSED = "this program does not allow it; it does with gpumond.agent.start(allow_limit=True) or GPUMOND_ALLOW_LIMIT=1"


def answers(allow_limit: bool) -> tuple[str, ...]:
    """The kinds of Ask that are not refused."""
    return ("limit", "snapshot") if allow_limit else ("snapshot",)


class Asks:
    def __init__(self) -> None:
        self._snapshots = snapshots.Asked()

    def answer(self, ask: Ask, workload: str, allow_limit: bool) -> Answer:
        """Never raises."""
        if ask.kind == "snapshot":
            dump = self._snapshots.write(workload)
            return Answer(ask.id, dump.reason, dump=dump)
        if not allow_limit:
            return Answer(ask.id, REFUSED)
        if ask.limit_bytes == 0:
            return Answer(ask.id, "a limit of 0 bytes would be none to some allocators, and the end to others")
        applied = limits.apply(ask.limit_bytes, ask.device_uuid)
        refused = "; ".join(one.reason for one in applied if not one.applied)
        reason = "" if any(one.applied for one in applied) else refused or "the program uses no allocator that is known"
        return Answer(ask.id, reason[:256], applied)
