"""Stable Diffusion web UI (AUTOMATIC1111): moves the checkpoint to the memory of the machine.

The call does not wait for a running job.
"""

from __future__ import annotations

from gpumond.facts.engines import EngineState
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import Dialogue, EngineSpec, ReleaseMethod, at, get, post, sends


def read(engine: EngineConfig) -> Dialogue[EngineState]:
    state = at((yield get("/sdapi/v1/progress", skip_current_image="true")).accepted().json, "state")
    jobs, job = at(state, "job_count", kind=int), at(state, "job", kind=str)
    begun = at(state, "job_timestamp", kind=str)
    running = None if jobs is None else max(jobs, 1 if job else 0, 0)
    return EngineState(running=running, work=(begun,) if begun else None)


SPEC = EngineSpec(
    kind="a1111",
    summary="Stable Diffusion web UI (AUTOMATIC1111), started with --api",
    read=read,
    warning="its unload doesn't wait for a job that begins at the same moment",
    methods=(
        ReleaseMethod(
            name="unload",
            release=sends(post("/sdapi/v1/unload-checkpoint")),
            serves_again="the next job loads the checkpoint again",
            undo=sends(post("/sdapi/v1/reload-checkpoint")),
            moves_to_host=True,
        ),
    ),
)
