"""The step `hooks` of a program whose agent reports no pool: the driver's count is the only one."""

from __future__ import annotations

from gpumond.facts.messages import FlushCommand, FlushResult
from gpumond.facts.pools import StepResult
from gpumond.host.peer import Identity
from tests.helpers.agents import GIB
from tests.helpers.scripted_programs import ScriptedPrograms
from tests.helpers.values import make_report


def call_functions(scripted: ScriptedPrograms, identity: Identity, command: FlushCommand) -> FlushResult:
    if command.dry_run:
        return FlushResult(command.id, "planned")
    scripted.unread_releases.append((identity.pid, "GPU-a", GIB))
    return FlushResult(command.id, "nothing", "", (), (StepResult("hooks", 0, 0.1),))


def test_functions_of_a_program_without_a_pool_have_the_drivers_count():
    scripted = ScriptedPrograms(make_report(), respond=call_functions, lag=5)
    scripted.driver_counts = {(10, "GPU-a"): 5 * GIB, (10, "GPU-b"): GIB}
    (plan,) = scripted.run(steps=("hooks",), dry_run=True).receipts
    answer = scripted.run(steps=("hooks",))
    assert (plan.outcome, plan.allocator, plan.driver_released_bytes) == ("planned", None, None)
    assert [
        (receipt.device_uuid, receipt.allocator, receipt.outcome, receipt.driver_released_bytes, receipt.steps[0].step)
        for receipt in answer.receipts
    ] == [("GPU-a", None, "freed", GIB, "hooks"), ("GPU-b", None, "nothing", 0, "hooks")]
    assert answer.released_bytes == GIB


def test_agent_of_an_earlier_version_refuses_functions_without_a_pool():
    def refuse(scripted: ScriptedPrograms, identity: Identity, command: FlushCommand) -> FlushResult:
        return FlushResult(command.id, "refused", f"no allocator {command.allocator!r} in this process")

    (receipt,) = ScriptedPrograms(make_report(), respond=refuse).run(steps=("hooks",)).receipts
    assert (receipt.outcome, receipt.reason) == ("refused", "no allocator '' in this process")
