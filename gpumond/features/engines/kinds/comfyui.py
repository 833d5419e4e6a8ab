"""ComfyUI: its worker frees models and cache between two prompts."""

from __future__ import annotations

from gpumond.facts.engines import EngineState
from gpumond.facts.errors import EngineError
from gpumond.facts.pools import Expected
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import Dialogue, EngineSpec, ReleaseMethod, at, entries, get, name_of, post, sends


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    """Read the number of prompts, which one worker executes one after the other. ``/queue`` states it, too, with the
    graphs of all of them.
    """
    queue = (yield get("/prompt")).accepted().json
    stats = (yield get("/system_stats")).accepted().json
    held = [at(device, "torch_vram_total", kind=int) for device in entries(stats, "devices")]
    stated = [size for size in held if size is not None]
    try:
        answer = yield get("/history", max_items="1")
        history = answer.json if answer.status == 200 else None
    except EngineError:  # the last prompt and its outputs have no limit of size
        history = None
    count = at(queue, "exec_info", "queue_remaining", kind=int)
    if count is None:
        raise EngineError("its answer has no exec_info.queue_remaining: is the engine's kind correct?")
    return EngineState(
        running=min(count, 1),
        waiting=max(count - 1, 0),
        held_bytes=sum(stated) if stated else None,
        work=tuple(map(name_of, history)) if isinstance(history, dict) else None,  # the id of the last prompt
    )


def estimate(engine: EngineConfig, state: EngineState, used: int) -> Expected:
    """Estimate what PyTorch holds. Models that custom nodes keep stay, and memory outside PyTorch may go too."""
    likely = used if state.held_bytes is None else min(used, state.held_bytes)
    return Expected(0, likely, used, "interval")


SPEC = EngineSpec(
    kind="comfyui",
    summary="ComfyUI",
    read=read,
    methods=(
        ReleaseMethod(
            name="free",  # without a true value the request does nothing, with the same answer
            release=sends(post("/free", {"unload_models": True, "free_memory": True})),
            serves_again="the next prompt loads its models again and executes all its nodes",
            estimate=estimate,
            waits=True,
            moves_to_host=True,
        ),
    ),
)
