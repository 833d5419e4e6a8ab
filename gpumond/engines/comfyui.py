"""ComfyUI: its worker frees models and cache between two prompts."""

from __future__ import annotations

from gpumond.engines.spec import Declaration, Dialogue, EngineSpec, Lever, at, entries, get, name_of, post
from gpumond.model.engines import EngineState
from gpumond.model.pools import Expected


def read(engine: Declaration) -> Dialogue[EngineState]:
    queue = (yield get("/queue")).accepted().json
    stats = (yield get("/system_stats")).accepted().json
    held = [at(device, "torch_vram_total", kind=int) for device in entries(stats, "devices")]
    known = [size for size in held if size is not None]
    history = yield get("/history", max_items="1")
    last = history.json if history.status == 200 else None
    counts = [at(queue, name, kind=list) for name in ("queue_running", "queue_pending")]
    running, waiting = (None if count is None else len(count) for count in counts)
    return EngineState(running=running, waiting=waiting, held_bytes=sum(known) if known else None, work=_work(last))


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
