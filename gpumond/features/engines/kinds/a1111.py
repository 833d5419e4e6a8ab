"""Stable Diffusion web UI (AUTOMATIC1111): moves the checkpoint to the memory of the machine.

The call does not wait for a running job.
"""

from __future__ import annotations

from gpumond.facts.engines import EngineState
from gpumond.features.engines.spec import Declaration, Dialogue, EngineSpec, Lever, all_but_contexts, at, get, post


def read(engine: Declaration) -> Dialogue[EngineState]:
    progress = (yield get("/sdapi/v1/progress", skip_current_image="true")).accepted().json
    jobs, job = at(progress, "state", "job_count", kind=int), at(progress, "state", "job", kind=str)
    running = None if jobs is None else max(jobs, 1 if job else 0, 0)
    begun = at(progress, "state", "job_timestamp", kind=str)
    return EngineState(running=running, work=(begun,) if begun else None)


def release(engine: Declaration, state: EngineState) -> Dialogue[tuple[str, ...]]:
    (yield post("/sdapi/v1/unload-checkpoint")).accepted()
    return ()


def undo(engine: Declaration, released: tuple[str, ...]) -> Dialogue[None]:
    (yield post("/sdapi/v1/reload-checkpoint")).accepted()


SPEC = EngineSpec(
    kind="a1111",
    summary="Stable Diffusion web UI (AUTOMATIC1111), started with --api",
    read=read,
    warning="its unload does not wait for a job that begins at the same moment",
    levers=(
        Lever(
            name="unload",
            release=release,
            serves_again="the next job loads the checkpoint again",
            estimate=all_but_contexts,
            undo=undo,
            moves_to_host=True,
        ),
    ),
)
