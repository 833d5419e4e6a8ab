"""Program with a fake of PyTorch that executes lines of its input, and flush commands for it."""

from __future__ import annotations

from gpumond.facts.messages import FlushCommand, FlushResult, Report
from tests.helpers.agent_daemon import FakeDaemon

MIB = 1 << 20


PROGRAM = f"""
import sys
import torch
from torch.world import ACTIVE, FREE, Segment
import gpumond.agent
torch.WORLD.reset(segments=[Segment([({12 * MIB}, ACTIVE), ({8 * MIB}, FREE)]), Segment([({40 * MIB}, FREE)])])
SETUP
gpumond.agent.start(workload="train", flush_policy=POLICY)
for line in sys.stdin:
    exec(line)
    print("did", line, end="", flush=True)
print(torch.WORLD.calls)
"""


def program(policy: str = "allow", setup: str = "") -> str:
    return PROGRAM.replace("POLICY", repr(policy)).replace("SETUP", setup)


def flush_command(
    steps: tuple[str, ...] = ("ipc", "cache", "trim"), allocator: str = "torch", **values: object
) -> FlushCommand:
    return FlushCommand("f1", allocator, steps, **values)  # type: ignore[arg-type]


def send_flush(daemon: FakeDaemon, flush: FlushCommand) -> FlushResult:
    daemon.wait_message(Report)
    daemon.wait_peer().send(flush)
    return daemon.wait_message(FlushResult)
