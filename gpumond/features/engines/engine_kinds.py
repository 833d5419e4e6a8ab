"""Kinds of serving engines, without I/O: each has a function that reads its state, and an `EngineSpec`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpumond.facts.engines import EngineModel, EngineState
from gpumond.facts.errors import EngineError, EngineTimeout
from gpumond.facts.pools import ExpectedRelease
from gpumond.features.engines.spec import (
    MAX_NAME_LENGTH,
    EngineRequest,
    EngineSpec,
    Exchange,
    MetricsPage,
    ReleaseMethod,
    check_model_to_unload,
    entries,
    get,
    json_part,
    load_models,
    models_to_unload,
    post,
    printable_name,
    read_flag,
    send_in_order,
    unload_models,
)

if TYPE_CHECKING:
    from gpumond.features.engines.settings import EngineConfig

OLLAMA_PINNED_FROM_YEAR = 2200
"""``keep_alive: -1`` sets an expiry that is centuries away."""


def read_ollama(engine: EngineConfig) -> Exchange[EngineState]:
    """Read ``/api/ps``, which lists what is loaded and neither loads a model nor extends its time.

    It does not list requests. The end of a request extends the time of its model, and only a model with a request
    remains after its time.
    """
    answer = (yield get("/api/ps")).raise_for_status().json
    models, expiries, overdue = [], [], []
    for entry in entries(answer, "models"):
        if name := json_part(entry, "name", kind=str) or json_part(entry, "model", kind=str):
            expiry = json_part(entry, "expires_at", kind=str) or ""
            pinned = expiry[:4].isdigit() and int(expiry[:4]) >= OLLAMA_PINNED_FROM_YEAR
            size, context = json_part(entry, "size_vram", kind=int), json_part(entry, "context_length", kind=int)
            models.append(EngineModel(printable_name(name), size, pinned, context))
            expiries.append(f"{name} {expiry}"[:MAX_NAME_LENGTH])
            if not pinned and _has_passed(expiry):
                overdue.append(printable_name(name))
    return EngineState(
        models=tuple(models),
        held_bytes=sum(model.size_bytes or 0 for model in models),
        work=tuple(sorted(expiries)),
        obstacle=f"{', '.join(overdue)}: running a request or being unloaded" if overdue else "",
    )


def _has_passed(expiry: str) -> bool:
    try:
        return datetime.fromisoformat(re.sub(r"\.\d+", "", expiry).replace("Z", "+00:00")).timestamp() < time.time()
    except ValueError:
        return False


def unload_ollama(model: EngineModel) -> EngineRequest:
    """Without a prompt and with a keep_alive of 0, the request loads nothing."""
    return post("/api/generate", {"model": model.name, "keep_alive": 0, "stream": False})


def ollama_reload_name(model: EngineModel) -> str:
    """Return the name of a model with the options that load it again as it was."""
    context = f" num_ctx={model.context_length}" if model.context_length else ""
    return f"{model.name}{context}{' keep_alive=-1' if model.pinned else ''}"


def undo_ollama(engine: EngineConfig, released: tuple[str, ...]) -> Exchange[None]:
    """Load each model with its context and pin. A model that generates no text is loaded by an empty input."""
    failures = []
    for text in released:
        name, *options = text.split(" ")
        values = dict(option.split("=") for option in options)
        body: dict[str, Any] = {"model": name, "stream": False}
        if "num_ctx" in values:
            body["options"] = {"num_ctx": int(values["num_ctx"])}
        if "keep_alive" in values:
            body["keep_alive"] = int(values["keep_alive"])
        try:
            answer = yield post("/api/generate", body)
            if answer.status == 400:
                answer = yield post("/api/embed", body | {"input": ""})
            answer.raise_for_status()
        except EngineTimeout:
            raise
        except EngineError as error:
            failures.append(f"{name}: {error}")
    if failures:
        raise EngineError("; ".join(failures))


OLLAMA = EngineSpec(
    kind="ollama",
    summary="Ollama",
    read=read_ollama,
    methods=(
        ReleaseMethod(
            name="unload",
            release=unload_models(unload_ollama, ollama_reload_name),
            wake_hint="the next request loads the model again",
            undo=undo_ollama,
            check=check_model_to_unload,
            ends_process=True,
            waits=True,
            settle_seconds=15.0,
        ),
    ),
)
"""Each model has a runner process, which ends when the model is unloaded."""


def read_comfyui(engine: EngineConfig) -> Exchange[EngineState]:
    """Read the number of prompts, which one worker executes one after the other. ``/queue`` states it, too, with the
    graphs of all of them.
    """
    queue = (yield get("/prompt")).raise_for_status().json
    stats = (yield get("/system_stats")).raise_for_status().json
    device_sizes = [json_part(device, "torch_vram_total", kind=int) for device in entries(stats, "devices")]
    known_sizes = [size for size in device_sizes if size is not None]
    try:
        answer = yield get("/history", max_items="1")
        history = answer.json if answer.status == 200 else None
    except EngineError:  # the last prompt and its outputs have no limit of size
        history = None
    remaining = json_part(queue, "exec_info", "queue_remaining", kind=int)
    if remaining is None:
        raise EngineError("the response has no exec_info.queue_remaining: is the engine's kind correct?")
    return EngineState(
        running=min(remaining, 1),
        waiting=max(remaining - 1, 0),
        held_bytes=sum(known_sizes) if known_sizes else None,
        work=tuple(map(printable_name, history)) if isinstance(history, dict) else None,  # the id of the last prompt
    )


def estimate_comfyui(engine: EngineConfig, state: EngineState, used: int) -> ExpectedRelease:
    """Estimate what PyTorch holds. Models that custom nodes keep stay, and memory outside PyTorch may go too."""
    likely = used if state.held_bytes is None else min(used, state.held_bytes)
    return ExpectedRelease(0, likely, used, "interval")


COMFYUI = EngineSpec(
    kind="comfyui",
    summary="ComfyUI",
    read=read_comfyui,
    methods=(
        ReleaseMethod(
            name="free",  # without a true value the request does nothing, with the same answer
            release=send_in_order(post("/free", {"unload_models": True, "free_memory": True})),
            wake_hint="the next prompt loads its models again and executes all its nodes",
            estimate=estimate_comfyui,
            waits=True,
            moves_to_host=True,
        ),
    ),
)
"""Its worker frees models and cache between two prompts."""


LLAMA_ROUTER_REQUESTS = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
LLAMA_ROUTER_WORK = ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")


def read_llama_router(engine: EngineConfig) -> Exchange[EngineState]:
    models = [
        each
        for each in entries((yield get("/models")).raise_for_status().json, "data")
        if json_part(each, "id", kind=str)
    ]
    states = {printable_name(entry["id"]): json_part(entry, "status", "value", kind=str) for entry in models}
    aliases = {printable_name(entry["id"]): tuple(map(printable_name, entries(entry, "aliases"))) for entry in models}
    counts: list[tuple[int | None, int | None]] = []
    work: list[float | str] | None = []
    no_counts_reason = ""
    for name in (name for name, value in states.items() if value == "loaded"):
        answer = yield get("/metrics", model=name, autoload="false")
        if answer.status in (401, 403):
            answer.raise_for_status()
        if answer.status == 501:
            no_counts_reason = "start the router with --metrics"
        page = MetricsPage(answer.body if answer.status == 200 else b"")
        counts.append((page.request_count(LLAMA_ROUTER_REQUESTS[0]), page.request_count(LLAMA_ROUTER_REQUESTS[1])))
        counters = page.totals(*LLAMA_ROUTER_WORK)
        work = None if work is None or counters is None else [*work, name, *counters]
    loaded = tuple(
        EngineModel(name, aliases=aliases[name]) for name, value in states.items() if value in ("loaded", "sleeping")
    )
    loading = [name for name, value in states.items() if value == "loading"]
    return EngineState(
        models=loaded,
        running=_sum_if_known(running for running, _ in counts),
        waiting=_sum_if_known(waiting for _, waiting in counts),
        sleeping=all(states[model.name] == "sleeping" for model in loaded) if loaded else None,
        held_bytes=None if loaded or loading else 0,
        work=None if work is None else tuple(work),
        obstacle=f"{', '.join(loading)}: being loaded" if loading else "",
        no_counts_reason=no_counts_reason,
    )


def _sum_if_known(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of the counts is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def undo_llama_router(engine: EngineConfig, models: tuple[str, ...]) -> Exchange[None]:
    """Load the models that no request has loaded yet."""
    models_json = entries((yield get("/models")).raise_for_status().json, "data")
    loaded = {
        json_part(each, "id")
        for each in models_json
        if json_part(each, "status", "value") in ("loaded", "loading", "sleeping")
    }
    yield from load_models({model: post("/models/load", {"model": model}) for model in models if model not in loaded})


LLAMA_ROUTER = EngineSpec(
    kind="llama-router",
    summary="llama.cpp's server, started as a router (without a model)",
    read=read_llama_router,
    methods=(
        ReleaseMethod(
            name="unload",
            release=unload_models(lambda model: post("/models/unload", {"model": model.name})),
            wake_hint="the next request loads the model again, unless the router runs with --no-models-autoload",
            undo=undo_llama_router,
            check=check_model_to_unload,
            ends_process=True,
            settle_seconds=20.0,
        ),
    ),
)
"""Each model has a child process, which ends when the model is unloaded.

The reads pass ``autoload=false``, without which they would load a model. ``/slots`` is not used: it wakes a model that
sleeps. A read of the metrics begins a new period of the server's own throughput averages.
"""


TRITON_PENDING = "nv_inference_pending_request_count"
TRITON_DONE = ("nv_inference_request_success", "nv_inference_request_failure")


def read_triton(engine: EngineConfig) -> Exchange[EngineState]:
    """Read the index and the metrics. The pending requests exclude the running ones, of which only the end is seen."""
    index = (yield post("/v2/repository/index", {})).raise_for_status().json
    models = [entry for entry in entries([index], 0) if json_part(entry, "name", kind=str)]
    ready = [printable_name(entry["name"]) for entry in models if json_part(entry, "state") == "READY"]
    busy = [printable_name(entry["name"]) for entry in models if json_part(entry, "state") in ("LOADING", "UNLOADING")]
    waiting, work = None, None
    if engine.metrics_address is not None:
        page = MetricsPage((yield get("/metrics", of_metrics=True)).raise_for_status().body)
        waiting = page.request_count(TRITON_PENDING)
        work = page.totals(*TRITON_DONE)
    return EngineState(
        models=tuple(EngineModel(name) for name in dict.fromkeys(ready)),
        waiting=waiting,
        work=work,
        obstacle=f"{', '.join(busy)}: being loaded or unloaded" if busy else "",
    )


def check_triton(engine: EngineConfig, state: EngineState) -> Exchange[str]:
    """Refuse without the pending requests, and for a model that an ensemble uses which stays."""
    if engine.metrics_address is None:
        return "the number of pending requests is unknown: set metrics_url, for example http://127.0.0.1:8002"
    unloaded = [model.name for model in models_to_unload(engine, state)]
    if not unloaded:
        return "none of the models under models: is ready; list the models to unload there"
    for model in state.models:
        if model.name not in unloaded:
            answer = yield get(f"/v2/models/{quote(model.name, safe='')}/config")
            steps = entries(answer.json, "ensemble_scheduling", "step") if answer.status == 200 else []
            components = [name for step in steps if (name := json_part(step, "model_name")) in unloaded]
            if components:
                return f"the ensemble {model.name} uses {components[0]}: list both under models:, or neither"
    return ""


def undo_triton(engine: EngineConfig, models: tuple[str, ...]) -> Exchange[None]:
    yield from load_models({model: post(_triton_path(model, "load"), {}) for model in reversed(models)})


def _triton_path(model: str, action: str) -> str:
    return f"/v2/repository/models/{quote(model, safe='')}/{action}"


def triton_config_error(engine: EngineConfig) -> str:
    if engine.models and engine.metrics_address:
        return ""
    return "allow requires models (the ones to unload) and metrics_url (to see pending requests)"


TRITON = EngineSpec(
    kind="triton",
    summary="Triton inference server (--model-control-mode=explicit)",
    read=read_triton,
    warning="requests for an unloaded model fail until the model is loaded again; frameworks don't release all of its "
    "memory",
    methods=(
        ReleaseMethod(
            name="unload",
            release=unload_models(lambda model: post(_triton_path(model.name, "unload"), {})),
            wake_hint="gpumond flush --workload NAME --step engine --wake; until then, requests for the models fail",
            undo=undo_triton,
            check=check_triton,
            stops_service=True,
            serves=lambda state, models: {*models} <= {model.name for model in state.models},
            settle_seconds=60.0,
        ),
    ),
    config_error=triton_config_error,
)
"""Unloads models that no request uses.

An unload is answered before the memory is free, and frameworks keep a part of it.
"""


def read_a1111(engine: EngineConfig) -> Exchange[EngineState]:
    state = json_part((yield get("/sdapi/v1/progress", skip_current_image="true")).raise_for_status().json, "state")
    jobs, job = json_part(state, "job_count", kind=int), json_part(state, "job", kind=str)
    job_started_at = json_part(state, "job_timestamp", kind=str)
    running = None if jobs is None else max(jobs, 1 if job else 0, 0)
    return EngineState(running=running, work=(job_started_at,) if job_started_at else None)


A1111 = EngineSpec(
    kind="a1111",
    summary="Stable Diffusion web UI (AUTOMATIC1111), started with --api",
    read=read_a1111,
    warning="the unload request takes no lock: a job that begins at the same moment may fail",
    methods=(
        ReleaseMethod(
            name="unload",
            release=send_in_order(post("/sdapi/v1/unload-checkpoint")),
            wake_hint="the next job loads the checkpoint again",
            undo=send_in_order(post("/sdapi/v1/reload-checkpoint")),
            moves_to_host=True,
        ),
    ),
)
"""Moves the checkpoint to the memory of the machine.

The call does not wait for a running job.
"""


VLLM_RUNNING, VLLM_WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
VLLM_KV_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
VLLM_WORK = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")


def read_vllm(engine: EngineConfig) -> Exchange[EngineState]:
    """Read the metrics and, where the release is allowed, ``/is_sleeping`` and ``/is_paused`` (development mode)."""
    page = MetricsPage((yield get("/metrics", of_metrics=True)).raise_for_status().body)
    running = page.request_count(VLLM_RUNNING)
    if running is None:
        raise EngineError(
            f"the metrics lack {VLLM_RUNNING}: start vLLM without --disable-log-stats, or correct the kind"
        )
    sleep_states = page.samples("vllm:engine_sleep_state")
    awake = [sample.value for sample in sleep_states if sample.labels.get("sleep_state") == "awake"]
    sleeping: bool | None = None if not awake else min(awake) <= 0  # all states are 0 without the KV cache alone
    paused: bool | None = None
    if engine.may_release:
        reported, paused = (yield from read_flag("is_sleeping")), (yield from read_flag("is_paused"))
        if reported is not None and not paused:  # it is true for a mere pause, too
            sleeping = sleeping or reported
    models = {
        printable_name(sample.labels["model_name"])
        for sample in page.samples(VLLM_RUNNING)
        if "model_name" in sample.labels
    }
    operations = page.total("vllm:sleep_mode_operations_in_flight")
    return EngineState(
        models=tuple(map(EngineModel, sorted(models))),
        running=running,
        waiting=page.request_count(VLLM_WAITING),
        kv_cache_used_ratio=page.mean(*VLLM_KV_CACHE),
        sleeping=sleeping,
        paused=paused,
        work=page.totals(*VLLM_WORK),
        obstacle="the engine is going to sleep or waking up" if operations else "",
    )


def check_vllm(engine: EngineConfig, state: EngineState) -> Exchange[str]:
    """Read the configuration. The server examines its environment first, which takes several seconds."""
    answer = yield get("/server_info", config_format="json")
    if answer.status == 404:
        return "vLLM's development routes are off: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    enabled = json_part(answer.raise_for_status().json, "vllm_config", "model_config", "enable_sleep_mode")
    if enabled is not True:
        return (
            "sleep mode is off: start vLLM with --enable-sleep-mode; without it, vLLM would pause and release nothing"
        )
    return ""


VLLM_DRAIN = post("/pause", seconds=30.0, mode="wait")
VLLM_SERVES_AGAIN = (
    "gpumond flush --workload NAME --step engine --wake; until then, requests fail with 503 (vLLM before 0.33 keeps "
    "them waiting)"
)

VLLM_RELEASE_KV_CACHE = ReleaseMethod(
    name="kv_cache",
    release=send_in_order(VLLM_DRAIN, post("/release_kv_cache_memory")),
    wake_hint=VLLM_SERVES_AGAIN,
    undo=send_in_order(post("/wake_up"), post("/resume")),
    check=check_vllm,
    stops_service=True,
    waits=True,
    call_seconds=60.0,
)
"""Its undo maps all that is not resident, then ends the pause. Neither has an effect on a server that serves.

``/resume`` alone would serve requests without the memory of a release that failed halfway.
"""

VLLM_SLEEP = replace(
    VLLM_RELEASE_KV_CACHE,
    name="sleep",
    release=send_in_order(VLLM_DRAIN, post("/sleep", level="1", mode="wait")),
    moves_to_host=True,
    call_seconds=120.0,
)

VLLM = EngineSpec(
    kind="vllm",
    summary="vLLM",
    read=read_vllm,
    warning="vLLM serves no requests until you wake it; the routes that gpumond uses need no key, so anyone who "
    "can reach its port can use them",
    methods=(VLLM_RELEASE_KV_CACHE, VLLM_SLEEP),
)
"""Releases its KV cache, or its KV cache and weights, while the server is paused.

Requests of the methods exist only if the server runs with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode. The server is
paused first, with the mode that completes running requests. Until it wakes up, it answers 503; versions before 0.33
keep requests waiting. Level 2 of its sleep, which discards the weights, is never used.
"""


SGLANG_WAITING = ("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs", "sglang:num_paused_reqs")
SGLANG_GB = 1 << 30
"""SGLang divides by it, and calls the result GB."""


def read_sglang(engine: EngineConfig) -> Exchange[EngineState]:
    """Read the metrics and the loads. Only the loads state sizes and how many ranks have them, and with an api key they
    require it; without --enable-metrics, they state the requests, too.
    """
    answer = yield get("/metrics", of_metrics=True)
    loads = yield get("/v1/loads", include="core,memory")
    if answer.status == 404:
        return _sglang_loads(loads.raise_for_status().json)
    page = _SglangFirstRank(answer.raise_for_status().body)
    return replace(
        _sglang_loads(loads.json) if loads.status == 200 else EngineState(),
        running=page.request_count("sglang:num_running_reqs"),
        waiting=page.request_count(*SGLANG_WAITING),
        kv_cache_used_ratio=_sglang_used_ratio(page),
        work=page.totals("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    )


class _SglangFirstRank(MetricsPage):
    """Samples of the first tensor-parallel rank of each replica, since each rank counts the same requests."""

    def __init__(self, page: bytes) -> None:
        lines = page.split(b"\n")
        super().__init__(b"\n".join(line for line in lines if b'tp_rank="' not in line or b'tp_rank="0"' in line))


def _bytes_of_all_ranks(gigabytes_per_rank: float | None, ranks: int | None) -> int | None:
    return int(gigabytes_per_rank * SGLANG_GB) * ranks if gigabytes_per_rank and ranks else None


def _sglang_used_ratio(page: MetricsPage) -> float | None:
    """Return the part of the KV cache that requests use; cached prefixes, which can be evicted, do not count."""
    parts = [page.total(f"sglang:kv_{part}_tokens") for part in ("used", "evictable", "available")]
    known_parts = [part for part in parts if part is not None]
    if len(known_parts) == len(parts) and sum(known_parts) > 0:
        return known_parts[0] / sum(known_parts)
    return page.mean("sglang:token_usage")


def _sglang_loads(answer: object) -> EngineState:
    ranks = answer if isinstance(answer, list) else entries(answer, "loads")
    accelerators = json_part(answer, "num_accelerators", kind=int)

    def total(*path: str) -> float | None:
        values = [json_part(rank, *path, kind=(int, float)) for rank in ranks]
        return sum(values) if values and None not in values else None

    running, waiting, kv_cache_used = total("num_running_reqs"), total("num_waiting_reqs"), total("token_usage")
    sizes = [total("memory", f"{part}_gb") for part in ("kv_cache", "weight", "graph")]
    known_sizes = [size for size in sizes if size is not None]
    return EngineState(
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        kv_cache_bytes=_bytes_of_all_ranks(sizes[0], accelerators),
        kv_cache_used_ratio=None if kv_cache_used is None else kv_cache_used / len(ranks),
        held_bytes=_bytes_of_all_ranks(sum(known_sizes), accelerators) if len(known_sizes) == len(sizes) else None,
    )


SGLANG = EngineSpec(
    kind="sglang",
    summary="SGLang (monitoring only)",
    read=read_sglang,
    no_methods_reason="a release crashes the server if a request is running, and health probes run requests",
)
"""It has a state only.

``/health`` is never read: it generates a token by default.
"""


TENSORRT_LLM_STATES = ("running", "parking", "parked", "waking", "failed")
TENSORRT_LLM_OBSTACLES = {
    "parking": "a release is in progress",
    "waking": "the engine is waking up",
    "failed": "the engine's memory is in the `failed` state: restart the engine",
}


def read_tensorrt_llm(engine: EngineConfig) -> Exchange[EngineState]:
    answer = (yield get("/memory_status")).raise_for_status().json
    state = json_part(answer, "state", kind=str)
    if state not in TENSORRT_LLM_STATES:
        raise EngineError("/memory_status reports an unknown state: is the engine's kind correct?")
    return EngineState(sleeping=state == "parked", obstacle=TENSORRT_LLM_OBSTACLES.get(state, ""))


def release_tensorrt_llm(engine: EngineConfig, state: EngineState) -> Exchange[tuple[str, ...]]:
    """Release what the method names, and return the tags that are parked afterwards. Without a tag, all is released."""
    body = {} if engine.method == "sleep" else {"tags": ["kv_cache"]}
    (yield post("/release_memory", body)).raise_for_status()
    return tuple(map(printable_name, entries((yield get("/memory_status")).raise_for_status().json, "parked_tags")))


def undo_tensorrt_llm(engine: EngineConfig, tags: tuple[str, ...]) -> Exchange[None]:
    (yield post("/resume_memory", {"tags": list(tags)} if tags else {})).raise_for_status()


TENSORRT_LLM_KV_CACHE = ReleaseMethod(
    name="kv_cache",
    release=release_tensorrt_llm,
    wake_hint="gpumond flush --workload NAME --step engine --wake; until then, the server rejects requests",
    undo=undo_tensorrt_llm,
    stops_service=True,
    waits=True,
    call_seconds=60.0,
)

TENSORRT_LLM = EngineSpec(
    kind="tensorrt-llm",
    summary="TensorRT-LLM (trtllm-serve --enable_sleep_mode)",
    read=read_tensorrt_llm,
    warning="the server rejects requests until you wake it; an error during the release may require a restart",
    methods=(
        TENSORRT_LLM_KV_CACHE,
        replace(TENSORRT_LLM_KV_CACHE, name="sleep", moves_to_host=True, call_seconds=120.0),
    ),
)
"""Closes admission, completes running requests, then releases.

``/metrics`` is not read: the server removes the statistics that it returns.
"""


LMDEPLOY_WAITING = ("lmdeploy:num_requests_waiting", "lmdeploy:num_api_requests_waiting")
LMDEPLOY_WORK = ("lmdeploy:prompt_tokens_total", "lmdeploy:generation_tokens_total", "lmdeploy:num_requests_finished")


def read_lmdeploy(engine: EngineConfig) -> Exchange[EngineState]:
    page = MetricsPage((yield get("/metrics", of_metrics=True)).raise_for_status().body)
    return EngineState(
        running=page.request_count("lmdeploy:num_requests_running"),
        waiting=page.request_count(*LMDEPLOY_WAITING),
        kv_cache_used_ratio=page.mean("lmdeploy:gpu_cache_usage_perc"),
        sleeping=(yield from read_flag("is_sleeping")) if engine.may_release else None,
        work=page.totals(*LMDEPLOY_WORK),
    )


LMDEPLOY = EngineSpec(
    kind="lmdeploy",
    summary="LMDeploy",
    read=read_lmdeploy,
    warning="sleep mode ends all sessions, including new ones; starting it requires no key, so anyone who can reach "
    "the port can do it",
    methods=(
        ReleaseMethod(
            name="sleep",
            release=send_in_order(post("/sleep", {}, level="1")),
            wake_hint="gpumond flush --workload NAME --step engine --wake; until then, the server responds with 503",
            undo=send_in_order(post("/wakeup", {})),
            stops_service=True,
            moves_to_host=True,
            call_seconds=60.0,
        ),
    ),
)
"""Level 1 of its sleep moves the weights to the memory of the machine and drops the KV cache.

The call ends all sessions. Level 2 would lose the weights.
"""


def resolve(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer (RFC 6901); None if there is none."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list):
            document = document[int(key)] if key.isdigit() and int(key) < len(document) else None
        else:
            document = document.get(key) if isinstance(document, dict) else None
    return document


def read_generic(engine: EngineConfig) -> Exchange[EngineState]:
    """Read the state. A declared pointer that leads nowhere is an error: an idle engine must not be assumed."""
    pointers = engine.state
    assert pointers is not None, "the configuration requires it"
    answer = (yield pointers.request).raise_for_status().json

    def value_at(pointer: str) -> Any:
        value = resolve(answer, pointer) if pointer else None
        if pointer and value is None:
            raise EngineError(f"the response has no value at {pointer}")
        return value

    def number_at(pointer: str) -> float | None:
        value = value_at(pointer)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def count_at(pointer: str) -> int | None:
        """Return a number, the length of a list or object, or 1 for True."""
        value = value_at(pointer)
        if isinstance(value, (list, dict)):
            return len(value)
        if value is not None and (not isinstance(value, (int, float)) or value < 0):
            raise EngineError(f"the value at {pointer} in the response must be a number, a list or a boolean")
        return None if value is None else -int(-value // 1)  # half a request is a request

    models, sleeping, work = value_at(pointers.models), value_at(pointers.sleeping), value_at(pointers.work)
    kv_cache, held = number_at(pointers.kv_cache_bytes), number_at(pointers.held_bytes)
    names = models if isinstance(models, (list, dict)) else [models]
    return EngineState(
        models=tuple(EngineModel(printable_name(name)) for name in names if isinstance(name, str)),
        running=count_at(pointers.running),
        waiting=count_at(pointers.waiting),
        kv_cache_bytes=None if kv_cache is None else int(kv_cache),
        kv_cache_used_ratio=number_at(pointers.kv_cache_used_ratio),
        held_bytes=None if held is None else int(held),
        sleeping=sleeping if isinstance(sleeping, bool) else None,
        work=None if work is None else (str(work),),
    )


def generic_method(engine: EngineConfig) -> ReleaseMethod | None:
    """Return the method that the declaration describes."""
    release, wake = engine.release, None if isinstance(engine.wake, bool) else engine.wake
    if release is None:
        return None
    wakes = "gpumond flush --workload NAME --step engine --wake, unless the engine returns on its own"
    return ReleaseMethod(
        name="release",
        release=send_in_order(release.request),
        wake_hint=wakes if wake else "the engine returns on its own",
        estimate=None
        if release.ends_process
        else lambda engine, state, used: ExpectedRelease(0, None, used, "interval"),
        undo=send_in_order(wake.request) if wake else None,
        stops_service=wake is not None,
        ends_process=release.ends_process,
        waits=release.waits,
        moves_to_host=release.moves_to_host,
    )


def generic_config_error(engine: EngineConfig) -> str:
    state, release = engine.state, engine.release
    if release is None:
        return "allow requires release, the request that releases memory"
    if state and not (state.running or state.waiting or release.waits):
        return (
            "allow requires state.running or state.waiting, because a busy engine must not be interrupted; or "
            "release.waits: true, if the engine completes running requests first"
        )
    return ""


GENERIC = EngineSpec(
    kind="generic",
    summary="any engine with an HTTP request that releases memory, described by JSON pointers",
    read=read_generic,
    method_of=generic_method,
    warning="gpumond knows the engine only from your description",
    config_error=generic_config_error,
)
"""The configuration states its requests, and where its answers state what (JSON pointers)."""


KINDS: Mapping[str, EngineSpec] = {
    spec.kind: spec
    for spec in (
        OLLAMA,
        COMFYUI,
        LLAMA_ROUTER,
        TRITON,
        A1111,
        VLLM,
        SGLANG,
        TENSORRT_LLM,
        LMDEPLOY,
        GENERIC,
    )
}
"""Each kind by its name in the configuration."""
