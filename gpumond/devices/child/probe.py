"""One reading of the driver without a daemon."""

from __future__ import annotations

from gpumond.devices.child.supervisor import Supervisor
from gpumond.facts.snapshot import Reading, SourceState

SECONDS = 6.0


async def probe(source: str) -> tuple[SourceState, Reading | None]:
    """Take one reading through a separate device child, so that a hanging driver does not block the caller."""
    supervisor = Supervisor(source)
    supervisor.start()
    reading = await supervisor.read(wait=SECONDS)
    state = supervisor.state
    await supervisor.stop()
    return state, reading
