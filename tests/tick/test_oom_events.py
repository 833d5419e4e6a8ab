"""Events of out-of-memory errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumond.events import EventState, advance_events, program_line_clause
from gpumond.facts.frame import Frame
from gpumond.facts.program import (
    AllocationSite,
    ByteChange,
    Call,
    LiveClasses,
    Oom,
    OomPool,
    PoolLimit,
    Program,
    ScopeRetained,
    ThreadStack,
)
from tests.helpers.agents import GIB
from tests.helpers.values import make_pool, make_report
from tests.tick.frames import UUID, between, make_frame


def make_oom(number: int = 1, **fields: Any) -> Oom:
    return Oom(**{"number": number, "at": 999_999.5, "seen": "scope"} | fields)


def test_oom_event_has_the_details_of_its_snapshot():
    pools = (
        OomPool(
            allocator="torch",
            device_uuid=UUID,
            live_bytes=5 * GIB,
            cached_bytes=0,
            stranded_bytes=3 * GIB,
            largest_free_bytes=512,
        ),
        OomPool(allocator="torch", device_uuid="GPU-b", live_bytes=9 * GIB, cached_bytes=0, stranded_bytes=0),
    )
    scopes = (ScopeRetained("epoch", ByteChange(GIB)),)
    oom = make_oom(device_uuid=UUID, request_bytes=3 * GIB, scope="epoch/forward", pools=pools, scopes=scopes)
    report = make_report()
    (event,) = between(
        make_frame(reports=(report,)), make_frame(reports=(replace(report, program=Program(ooms=(oom,))),))
    )
    assert (event.kind, event.at, event.device_uuid, event.pid) == ("oom", 1_000_000.0, UUID, 10)
    assert event.summary == (
        "train (pid 10) ran out of memory on GPU 0 in the scope epoch/forward when it requested 3.0 GiB: "
        "5.0 GiB live, 0 B cached, 3.0 GiB stranded"
    )
    assert dict(event.details) == {
        "number": 1,
        "seen": "scope",
        "scope": "epoch/forward",
        "request_bytes": 3 * GIB,
        "live_bytes": 5 * GIB,
        "cached_bytes": 0,
        "stranded_bytes": 3 * GIB,
        "largest_free_bytes": 512,
        "occurred_at": 999_999.5,
        "retained_bytes epoch": GIB,
        "advice": "set PYTORCH_ALLOC_CONF to expandable_segments:True",
    }


@pytest.mark.parametrize(
    ("file", "function", "place"),
    [
        ("/data/train.py", "step", " in `step` at /data/train.py:31"),
        (
            "/venv/lib/python3.11/site-packages/gpumond/sim/programs.py",
            "finetune",
            " in `finetune` at gpumond/sim/programs.py:31",
        ),
        ("<stdin>", "<module>", " at <stdin>:31"),
        ("<string>", "step", " in `step`"),
        ("<string>", "<module>", ""),
        ("/venv/lib/python3.11/site-packages/torch/nn/functional.py", "linear", ""),
    ],
)
def test_place_of_an_error_is_one_that_a_reader_finds(file: str, function: str, place: str):
    assert program_line_clause((Call(file, 31, function), Call("<string>", 1, "<module>"))) == place


def test_oom_event_at_the_programs_own_limit_says_so():
    pool = OomPool(allocator="torch", device_uuid=UUID, live_bytes=2 * GIB, cached_bytes=0, stranded_bytes=0)
    oom = make_oom(device_uuid=UUID, request_bytes=GIB, pools=(pool,), allocator="torch", free_bytes=9 * GIB)
    report = make_report(limits=(PoolLimit("torch", UUID, 5 * GIB // 2, "chat"),))
    for free, what in ((9 * GIB, "reached its limit of 2.5 GiB on GPU 0"), (0, "ran out of memory on GPU 0")):
        failed = replace(report, program=Program(ooms=(replace(oom, free_bytes=free),)))
        (event,) = between(make_frame(reports=(report,)), make_frame(reports=(failed,)))
        assert (
            event.summary == f"train (pid 10) {what} when it requested 1.0 GiB: 2.0 GiB live, 0 B cached, 0 B stranded"
        )
        assert dict(event.details).get("limit_bytes") == (5 * GIB // 2 if free else None)


def test_oom_event_has_the_line_the_threads_and_the_classes():
    library = Call("/venv/lib/python3.11/site-packages/torch/nn/functional.py", 9, "linear")
    own = Call("/home/a/train.py", 31, "step")
    oom = make_oom(
        device_uuid=UUID,
        pools=(OomPool(allocator="torch", device_uuid=UUID, live_bytes=GIB, cached_bytes=0, stranded_bytes=0),),
        stack=(library, own, Call("/home/a/train.py", 50, "main")),
        threads=(ThreadStack("loader", (own,)),),
        open_scopes=("epoch", "epoch/forward"),
        classes=tuple(
            LiveClasses(
                allocator="torch",
                device_uuid=uuid,
                live_bytes=GIB,
                parameters_bytes=1,
                gradients_bytes=0,
                optimizer_bytes=0,
                buffers_bytes=4,
                tensors_bytes=5,
                activations_bytes=GIB - 10,
            )
            for uuid in (UUID, "GPU-b")
        ),
    )
    report = make_report()
    (event,) = between(
        make_frame(reports=(report,)), make_frame(reports=(replace(report, program=Program(ooms=(oom,))),))
    )
    assert "ran out of memory on GPU 0 in `step` at /home/a/train.py:31: 1.0 GiB live" in event.summary
    details = dict(event.details)
    assert details["line"] == "/home/a/train.py:31 step"
    assert str(details["stack"]).endswith("linear < /home/a/train.py:31 step < /home/a/train.py:50 main")
    assert details["thread loader"] == "/home/a/train.py:31 step"
    assert details["open_scopes"] == "epoch, epoch/forward"
    names = ("parameters", "gradients", "optimizer", "buffers", "tensors", "activations")
    assert [details[f"torch {name}_bytes"] for name in names] == [1, 0, 0, 4, 5, GIB - 10]
    assert details["advice"] == "use a smaller batch"


def test_unknown_classes_are_absent_and_their_bytes_are_in_no_other_class():
    oom = make_oom(
        device_uuid=UUID,
        classes=(LiveClasses(allocator="torch", device_uuid=UUID, live_bytes=GIB, parameters_bytes=1),),
        sites=(AllocationSite(GIB, 2, (Call("/home/a/train.py", 31, "step"),)),),
    )
    report = make_report()
    (event,) = between(
        make_frame(reports=(report,)), make_frame(reports=(replace(report, program=Program(ooms=(oom,))),))
    )
    details = dict(event.details)
    of_classes = {name: value for name, value in details.items() if name.startswith("torch ")}
    assert of_classes == {"torch parameters_bytes": 1, "torch unclassified_bytes": GIB - 1}
    assert details["allocation site 1"] == "1.0 GiB: /home/a/train.py:31 step"


def test_details_of_a_hostile_record_are_limited():
    call = Call("f" * 256, 2**62, "g" * 256)
    threads = tuple(ThreadStack(f"t{number}", (call,) * 100) for number in range(100))
    sites = (AllocationSite(2**62, 1, (call,) * 100),) * 100
    oom = make_oom(stack=(call,) * 100, threads=threads, open_scopes=("s" * 128,) * 100, sites=sites)
    report = make_report()
    (event,) = between(
        make_frame(reports=(report,)), make_frame(reports=(replace(report, program=Program(ooms=(oom,))),))
    )
    assert sum(len(str(value)) for _, value in event.details) < 8000
    assert len(event.details) < 30


def test_oom_snapshot_in_several_reports_is_one_event():
    def at(*ooms: Oom) -> Frame:
        return make_frame(reports=(make_report(program=Program(ooms=ooms)),))

    assert [event.kind for event in between(at(make_oom(1)), at(make_oom(1)))] == []
    assert [
        dict(event.details)["number"] for event in between(at(make_oom(1)), at(make_oom(1), make_oom(2), make_oom(3)))
    ] == [
        2,
        3,
    ]
    away = between(at(make_oom(1)), make_frame(), at(make_oom(1)))
    assert [event.kind for event in away] == ["agent-connected"]


def test_oom_snapshot_of_an_ended_program_is_an_event():
    connected = make_frame(reports=(make_report(),))
    last = make_report(program=Program(ooms=(make_oom(1),)))
    events = between(connected, make_frame(), exited_reports=[last])
    assert [event.kind for event in events] == ["agent-disconnected", "oom"]
    known = make_frame(reports=(last,))
    assert between(known, make_frame(), exited_reports=[last]) == between(known, make_frame())


def test_oom_snapshots_from_before_the_start_make_no_event():
    frame = make_frame(reports=(make_report(program=Program(ooms=(make_oom(1, at=10.0), make_oom(2, at=30.0)))),))
    _, events = advance_events(EventState(since=20.0), frame)
    assert [dict(event.details)["number"] for event in events if event.kind == "oom"] == [2]


def test_oom_counter_makes_an_event_for_an_agent_without_snapshots():
    before, after = (make_frame(reports=(make_report(pools=(make_pool(live=GIB, cached=2, ooms=n),)),)) for n in (1, 2))
    (event,) = between(before, after)
    assert (event.kind, event.device_uuid, dict(event.details)["cached_bytes"]) == ("oom", UUID, 2)
    assert between(make_frame(reports=(make_report(),)), after) == []  # the age of its errors is unknown
