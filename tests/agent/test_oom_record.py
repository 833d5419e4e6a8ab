"""The OOM record: stacks without values, the last minute and open scopes. It is bounded in size."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumond import agent
from gpumond.agent.measure import stacks
from gpumond.agent.measure.oom_record import MAX_RECORD_BYTES, OOMS
from gpumond.agent.program_report import program_report
from gpumond.facts.messages import MAX_MESSAGE_BYTES, Report, decode, encode, to_json
from gpumond.facts.program import Oom
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, OutOfMemory
from tests.helpers.agent_daemon import FAKES, environment

SECRET = "a value of the program"


def fail(allocator: CachingAllocator, secret: str) -> None:
    allocator.malloc(2000 * MIB)


def the_record(allocator: CachingAllocator) -> Oom:
    with pytest.raises(OutOfMemory), agent.scope("epoch"):
        fail(allocator, SECRET)
    return agent.program().ooms[-1]


def test_record_has_the_stack_of_the_failing_call(allocator: CachingAllocator):
    record = the_record(allocator)
    calls = [(Path(call.file).name, call.function.rpartition(".")[2]) for call in record.stack]
    here = Path(__file__).name
    assert ("allocator.py", "malloc") in calls[:4]
    assert calls.index((here, "fail")) < calls.index((here, "the_record"))
    line = next(call.line for call in record.stack if call.function == "fail")
    assert "malloc" in Path(__file__).read_text().splitlines()[line - 1]
    assert record.open_scopes == ("epoch",)
    assert SECRET not in to_json(record).decode()
    assert not [call for call in record.stack if call.file.startswith(stacks.AGENT_DIRECTORY)]


def test_middle_of_a_deep_stack_is_omitted(allocator: CachingAllocator):
    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
        else:
            allocator.malloc(2000 * MIB)

    with pytest.raises(OutOfMemory), agent.scope("epoch"):
        deeper(200)
    (record,) = agent.program().ooms
    assert len(record.stack) == 2 * stacks.MAX_END_CALLS
    assert record.omitted_calls > 150


def test_record_has_the_threads_inside_a_library_with_an_allocator(allocator: CachingAllocator):
    """The simulated allocator calls back into the test, as a library does that waits inside an allocation."""
    inside, over = threading.Event(), threading.Event()
    module: dict[str, Any] = {"__name__": "gpumond.sim.allocator.pretended", "inside": inside, "over": over}
    exec("def allocate():\n    inside.set()\n    over.wait()", module)
    threads = [
        threading.Thread(target=module["allocate"], name="loader"),
        threading.Thread(target=over.wait, name="elsewhere"),
    ]
    for thread in threads:
        thread.start()
    inside.wait()
    record = the_record(allocator)
    over.set()
    for thread in threads:
        thread.join()
    assert [stack.thread for stack in record.threads] == ["loader"]
    assert "allocate" in [call.function for call in record.threads[0].calls]


def test_record_is_bounded_and_only_the_newest_is_whole(allocator: CachingAllocator):
    name = "f" * 300
    module: dict[str, Any] = {"malloc": allocator.malloc}
    exec(
        compile(f"def {name}(n):\n    return {name}(n - 1) if n else malloc(2000 << 20)", "\u4e00" * 400, "exec"),
        module,
    )
    for _ in range(6):
        with pytest.raises(OutOfMemory), agent.scope("epoch"):
            module[name](60)
    *older, newest = agent.program().ooms
    assert len(to_json(newest)) <= MAX_RECORD_BYTES
    assert newest.stack
    assert not any(oom.stack or oom.threads for oom in older)
    message = encode(Report(program=program_report(False)))
    assert len(message) < MAX_MESSAGE_BYTES
    assert decode(message) == Report(program=program_report(False))


class Tensor:
    """Memory of a program that fails."""


def test_record_keeps_no_object_of_the_program(allocator: CachingAllocator):
    gc.collect()
    gc.disable()
    try:
        tensor = Tensor()
        freed = weakref.ref(tensor)

        def work(held: Tensor) -> None:
            allocator.malloc(2000 * MIB)

        with pytest.raises(OutOfMemory) as caught, agent.scope("epoch"):
            work(tensor)
        caught.value.__traceback__ = None
        del tensor, caught
        assert freed() is None
    finally:
        gc.enable()


def test_stack_of_an_error_that_was_never_raised_is_empty():
    assert stacks.of_error(ValueError()) == ((), 0)


def test_successful_call_records_nothing(allocator: CachingAllocator):
    before = SimpleNamespace(**vars(OOMS))
    with agent.scope("epoch"):
        allocator.free(allocator.malloc(8 * MIB))
    assert vars(OOMS) == vars(before)


RECORDED = """
import torch
from gpumond import agent
from gpumond.agent.measure.oom_record import OOMS
from gpumond.facts.messages import to_json
from torch.world import ACTIVE, FREE, WORLD, Segment
sizes = [4, 2, 8] * 100
WORLD.reset(segments=[Segment([(size << 20, ACTIVE) for size in sizes])])
plain = WORLD.snapshot
def snapshot():
    segments = plain()
    for number, block in enumerate(segments[0]["blocks"]):
        call = {"filename": f"/home/a/{'n' * 150}.py", "line": number % 30, "name": "step"}
        block["frames"] = [call] * 20
    return segments
WORLD.snapshot = snapshot
def fail():
    try:
        raise RuntimeError("CUDA out of memory")
    except RuntimeError as error:
        OOMS.record_error(error, "scope")
fail()
WORLD.records_history = True
fail()
for oom in agent.program().ooms:
    print(len(oom.sites), sum(site.size_bytes for site in oom.sites) >> 20, len(to_json(oom)) <= 16 << 10)
print(len(agent.program().ooms[-1].stack) > 0, len(oom.sites[0].calls))
"""


def test_record_has_the_sites_that_keep_most_while_the_program_records_its_history():
    """Thirty lines have ten blocks of one size each. Sites of an earlier record are not sent again."""
    done = subprocess.run(
        [sys.executable, "-c", RECORDED],
        env=environment("/nowhere", FAKES),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["0 0 True", f"5 {5 * 80} True", "True 6"]
