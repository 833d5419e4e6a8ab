"""Each advice applies under its condition, and not without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumond.diagnosis.advice import (
    ADVICE,
    AdviceContext,
    advice_clauses,
    advice_texts,
    torch_setting,
    whole_block_change,
)
from gpumond.facts.program import LiveClasses, Oom, OomPool
from gpumond.facts.snapshot import AgentReport
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report

UUID = "GPU-a"
DEVICE = make_device(UUID, processes=(make_process(10, 30 * GIB), make_process(11, 40 * GIB)))
OOM = Oom(number=1, at=1.0, seen="scope", device_uuid=UUID)


def classes(**sizes: int) -> LiveClasses:
    names = ("parameters", "gradients", "optimizer", "buffers", "tensors", "activations")
    fields: dict[str, Any] = {f"{name}_bytes": sizes.get(name, 0) for name in names}
    return LiveClasses(allocator="torch", device_uuid=UUID, live_bytes=sum(sizes.values()), **fields)


def torch_case(framework: str = "torch 2.13.0", stranded: int = 0, **fields: Any) -> AdviceContext:
    report = make_report(pools=(make_pool(UUID, live=GIB, stranded=stranded),), frameworks=(framework,))
    return AdviceContext(report=report, device_uuid=UUID, device=DEVICE, **fields)


def failed(request: int, cached: int = 0, stranded: int = 0) -> Oom:
    pool = OomPool(allocator="torch", device_uuid=UUID, live_bytes=1, cached_bytes=cached, stranded_bytes=stranded)
    return replace(OOM, request_bytes=request, pools=(pool,))


def names(case: AdviceContext) -> list[str]:
    return [one.name for one in ADVICE if one.applies(case)]


@pytest.mark.parametrize(
    ("case", "applies"),
    [
        (torch_case(stranded=4 * GIB), True),
        (torch_case(stranded=3 * GIB), False),
        (torch_case(oom=failed(GIB, stranded=GIB)), True),
        (torch_case(oom=failed(2 * GIB, stranded=GIB)), False),
        (torch_case(oom=failed(GIB, cached=2 * GIB)), False),  # PyTorch had released its cache, or has expandable ones
        (torch_case(oom=replace(OOM, request_bytes=None)), False),
        (replace(torch_case(stranded=4 * GIB), device=None), False),
        (replace(torch_case(stranded=4 * GIB), device_uuid="GPU-b"), False),
    ],
)
def test_fragmentation_of_pytorch_advises_expandable_segments(case: AdviceContext, applies: bool):
    assert ("expandable-segments" in names(case)) is applies


@pytest.mark.parametrize("own", [{"unmapped_bytes": GIB}, {"private_bytes": GIB}])
def test_expandable_segments_are_not_advised_for_a_program_that_can_sleep(own: dict[str, int]):
    """Its pools belong to another allocator, with which they are incompatible."""
    pools = (make_pool(UUID, live=GIB, stranded=4 * GIB, **own),)
    case = torch_case()
    assert "expandable-segments" not in names(replace(case, report=replace(case.report, pools=pools)))


@pytest.mark.parametrize(
    ("framework", "text"),
    [
        ("torch 2.13.0", "set PYTORCH_ALLOC_CONF to expandable"),
        ("torch 2.10.1+cu126", "set PYTORCH_CUDA_ALLOC_CONF to expandable"),
        ("torch unknown", "set PYTORCH_CUDA_ALLOC_CONF to expandable"),
        ("torch 2.13.0+rocm6.4", "to max_split_size_mb:512"),
    ],
)
def test_setting_of_pytorch_depends_on_the_version(framework: str, text: str):
    (clause,) = advice_texts(torch_case(framework, stranded=4 * GIB))
    assert text in clause


@pytest.mark.parametrize(
    ("allocator", "framework", "change"),
    [
        ("torch", "torch 2.13.0", "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("torch", "torch 2.10.1+rocm6.4", "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512"),
        ("cupy", "cupy 14.2.0", "allocate from cupy.cuda.MemoryAsyncPool"),
        ("paddle", "paddle 3.0", ""),
    ],
)
def test_free_memory_stays_in_one_piece_by_what_the_allocator_accepts(allocator: str, framework: str, change: str):
    assert whole_block_change(allocator, torch_case(framework)) == change


@pytest.mark.parametrize(("request_mib", "size"), [(1, 32), (100, 100), (4000, 512)])
def test_max_split_size_is_that_of_the_failed_request(request_mib: int, size: int):
    (clause,) = advice_texts(torch_case("torch 2.10.1+rocm6.4", oom=failed(request_mib << 20, stranded=8 * GIB)))
    assert clause.endswith(f"max_split_size_mb:{size}")


TRAINING = classes(parameters=10, gradients=10, optimizer=20, activations=60)
INFERENCE = classes(parameters=30, tensors=40, activations=30)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            torch_case(oom=replace(OOM, classes=(TRAINING,))),
            ["gradient-checkpointing", "mixed-precision", "smaller-batch"],
        ),
        (torch_case(retried=True, classes=(TRAINING,)), ["gradient-checkpointing", "mixed-precision", "smaller-batch"]),
        (torch_case(classes=(TRAINING,)), []),  # not short of memory
        (torch_case(retried=True, classes=(INFERENCE,)), ["smaller-batch"]),
        (torch_case(retried=True, classes=(classes(parameters=60, gradients=10, activations=30),)), []),
        (torch_case(retried=True, classes=(replace(TRAINING, device_uuid="GPU-b"),)), []),
        (torch_case(retried=True), []),
    ],
)
def test_classes_of_live_bytes_advise_a_change_of_the_program(case: AdviceContext, expected: list[str]):
    assert names(case) == expected


def test_batch_of_a_training_keeps_its_effect_by_accumulation():
    assert "gradient accumulation" in advice_texts(torch_case(retried=True, classes=(TRAINING,)))[-1]
    assert advice_texts(torch_case(retried=True, classes=(INFERENCE,))) == ["use a smaller batch"]


def holder(allocator: str, unused: int, **fields: Any) -> AgentReport:
    pool = make_pool(UUID, live=GIB, cached=unused, allocator=allocator, **fields)
    return make_report(pid=11, workload="server", pools=(pool,))


@pytest.mark.parametrize(
    ("allocator", "name", "text"),
    [
        (
            "tensorflow",
            "tensorflow-memory-growth",
            "set_memory_growth(gpu, True) at the start of",
        ),
        ("jax", "jax-preallocation", "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("rmm", "rmm-pool-size", "initial_pool_size"),
    ],
)
def test_large_unused_pool_on_the_device_advises_its_program(allocator: str, name: str, text: str):
    case = torch_case(oom=OOM)
    much, little = holder(allocator, 20 * GIB), holder(allocator, 19 * GIB)
    assert names(replace(case, reports=(case.report, much))) == [name]
    assert names(replace(case, reports=(case.report, little))) == []
    assert names(replace(case, oom=None, reports=(case.report, much))) == []
    (clause,) = advice_texts(replace(case, reports=(case.report, much)))
    assert text in clause
    assert clause.endswith("server (pid 11), which holds 20.0 GiB unused")


def test_driver_counts_what_a_library_does_not_state():
    case = torch_case(oom=OOM)
    unknown = holder("tensorflow", 0, held_known=False)
    (clause,) = advice_texts(replace(case, reports=(unknown,)))
    assert clause.endswith("server (pid 11), which holds 39.0 GiB unused")
    unlisted = replace(unknown, pid=12)
    assert advice_texts(replace(case, reports=(unlisted,))) == []


def test_sentence_continues_a_summary():
    assert advice_clauses(torch_case()) == ""
    assert advice_clauses(torch_case(retried=True, classes=(INFERENCE,))) == "; use a smaller batch"


def test_names_of_advice_are_unique():
    assert len({one.name for one in ADVICE}) == len(ADVICE)
    assert all(one.meaning for one in ADVICE)


def test_setting_of_an_unknown_version_is_the_older_name():
    assert torch_setting(("torch unknown",)) == "PYTORCH_CUDA_ALLOC_CONF"
    assert torch_setting(()) == "PYTORCH_ALLOC_CONF"


def test_reference_lists_all_advice_with_its_condition():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "out-of-memory.md").read_text()
    assert [one.name for one in ADVICE if f"| {one.name} | {one.meaning} |" not in page] == []
