"""ComfyUI: its worker frees models and cache between two prompts."""

from __future__ import annotations

from gpumond.facts.engines import EngineState
from gpumond.facts.errors import EngineError
from gpumond.facts.pools import Expected
from gpumond.features.engines.spec import Declaration, Dialogue, EngineSpec, Lever, at, entries, get, name_of, post


def read(engine: Declaration) -> Dialogue[EngineState]:
    """Read the number of prompts, which one worker executes one after the other. ``/queue`` states it, too, with the
    graphs of all of them.
    """
    queue = (yield get("/prompt")).accepted().json
    stats = (yield get("/system_stats")).accepted().json
    held = [at(device, "torch_vram_total", kind=int) for device in entries(stats, "devices")]
    known = [size for size in held if size is not None]
    try:
        history = yield get("/history", max_items="1")
        last = history.json if history.status == 200 else None
    except EngineError:  # the last prompt and its outputs have no limit of size
        last = None
    count = at(queue, "exec_info", "queue_remaining", kind=int)
    if count is None:
        raise EngineError("its answer has no exec_info.queue_remaining: is the kind of the engine correct?")
    return EngineState(
        running=min(count, 1),
        waiting=max(count - 1, 0),
        held_bytes=sum(known) if known else None,
        work=_work(last),
    )


def _work(history: object) -> tuple[str, ...] | None:
    """Return the id of the last prompt, which changes with each."""
    return tuple(map(name_of, history)) if isinstance(history, dict) else None


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    """Set both flags. Without a true value the request would do nothing, with the same answer."""
    (yield post("/free", {"unload_models": True, "free_memory": True})).accepted()
    return ()


def estimate(engine: Declaration, state: EngineState, used: int) -> Expected:
    """Estimate what PyTorch holds. Models that custom nodes keep stay, and memory outside PyTorch may go too."""
    likely = used if state.held_bytes is None else min(used, state.held_bytes)
    return Expected(0, likely, used, "interval")


SPEC = EngineSpec(
    kind="comfyui",
    summary="ComfyUI",
    read=read,
    levers=(
        Lever(
            name="free",
            release=release,
            serves_again="the next prompt loads its models again and executes all its nodes",
            estimate=estimate,
            waits=True,
            moves_to_host=True,
        ),
    ),
)
