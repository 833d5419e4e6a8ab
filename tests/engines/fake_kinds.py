"""Fakes whose own process holds the memory."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from tests.engines.fake_base import InProcess, Response
from tests.helpers.agents import GIB


class ComfyUi(InProcess):
    kind = "comfyui"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/prompt" and method == "GET":
            return 200, {"exec_info": {"queue_remaining": self.running}}
        if path == "/queue":  # all prompts with their graphs
            return 200, {"queue_running": [["prompt", "x" * (9 << 20)]], "queue_pending": []}
        if path == "/system_stats":
            total = self.rest if self.sleeping else self.held
            return 200, {"devices": [{"torch_vram_total": total, "torch_vram_free": 0, "vram_free": GIB}]}
        if path == "/history":
            return 200, {f"prompt-{self.completed}": {}} if query == {"max_items": "1"} else {}
        if path == "/free":
            if body.get("unload_models") is True and body.get("free_memory") is True:

                def between_prompts() -> None:
                    self.drained()
                    self.act(self.free)

                threading.Thread(target=between_prompts, daemon=True).start()
            return 200, ""
        return 404, {}


class A1111(InProcess):
    kind = "a1111"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/sdapi/v1/progress":
            job = "task" if self.running else ""
            stamp = f"2026112210{self.completed + self.running:04}"
            return 200, {"state": {"job_count": self.running, "job": job, "job_timestamp": stamp}}
        if path == "/sdapi/v1/unload-checkpoint":
            self.abort()  # it takes no lock
            self.act(self.free)
            return 200, {}
        if path == "/sdapi/v1/reload-checkpoint":
            self.reload()
            return 200, {}
        return 404, {}


class SgLang(InProcess):
    kind = "sglang"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path.startswith("/health"):
            self.harms.append("a probe generated a token")
            return 200, ""
        if path == "/metrics" and "no-metrics" not in self.faults:
            values = {"sglang__num_running_reqs": self.running, "sglang__num_queue_reqs": 2}
            tokens = {"used": 100, "evictable": 300, "available": 600}
            values |= {f"sglang__kv_{part}_tokens": count for part, count in tokens.items()}
            sizes = {"sglang__weight_memory_usage_gb": 0.75, "sglang__kv_cache_memory_usage_gb": 1.25}
            ranks = (0, 1) if "all-schedulers" in self.faults else (0,)
            return 200, "".join(self.metrics(**values, **sizes).replace("}", f',tp_rank="{rank}"}}') for rank in ranks)
        if path == "/v1/loads":  # the sizes of one rank
            if "api-key" in self.faults:
                return 401, {"error": "Unauthorized"}
            memory = {"weight_gb": 0.75, "kv_cache_gb": 1.25, "graph_gb": 0.0, "token_capacity": 1000}
            load = {"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 2, "token_usage": 0.1}
            return 200, {"num_accelerators": 2, "loads": [load | {"memory": memory}]}
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            os.kill(os.getpid(), signal.SIGKILL)
        return 404, {}


class TensorRtLlm(InProcess):
    kind = "tensorrt-llm"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        parked = "parking" if self.running else "parked"
        state = "failed" if "failed" in self.faults else parked if self.paused else "running"
        if path == "/memory_status":
            return 200, {"state": state, "parked_tags": ["kv_cache"] if self.paused else []}
        if path == "/metrics":
            self.harms.append("statistics removed")
            return 200, []
        if path == "/release_memory":
            if state != "running":
                return 409, {"error": state}
            self.paused = True
            self.drained()
            self.act(self.free)
            return 200, {"status": "success"}
        if path == "/resume_memory":
            if body != {"tags": ["kv_cache"]}:
                return 400, {"error": "unknown tag"}
            self.reload()
            self.paused = False
            return 200, {"status": "success"}
        return 404, {}


class LmDeploy(InProcess):
    kind = "lmdeploy"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/metrics":
            values = {"lmdeploy__num_requests_running": self.running, "lmdeploy__num_requests_waiting": 0}
            return 200, self.metrics(**values, lmdeploy__gpu_cache_usage_perc=0.25)
        if path == "/is_sleeping":
            return 200, {"is_sleeping": self.paused}
        if path == "/sleep":
            if body is None:
                return 415, {"error": "expected application/json"}
            if query.get("level") != "1":
                self.harms.append("weights lost")
            self.abort()
            self.paused = True
            self.act(self.free)
            return 200, ""
        if path == "/wakeup":
            self.reload()
            self.paused = False
            return 200, ""
        return 404, {}


class Triton(InProcess):
    kind = "triton"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/v2/repository/index":
            state = "UNAVAILABLE" if self.sleeping else "READY"
            models = [{"name": "resnet", "version": "1", "state": state}, {"name": "pipeline", "state": "READY"}]
            return 200, [model for model in models if model["state"] == "READY" or not body.get("ready")]
        if path == "/metrics":
            pending = 0  # excludes the running ones
            counts = {"nv_inference_pending_request_count": pending, "nv_inference_request_success": self.completed}
            return 200, self.metrics(**counts)
        if path == "/v2/models/pipeline/config":
            steps = [{"model_name": "resnet"}] if "ensemble" in self.faults else []
            return 200, {"name": "pipeline", "ensemble_scheduling": {"step": steps}}
        if path == "/v2/repository/models/resnet/unload":
            if "not-explicit" in self.faults:
                return 400, {"error": "explicit model load / unload is not allowed"}

            def unload() -> None:
                self.drained()
                self.act(self.free)

            threading.Thread(target=unload, daemon=True).start()
            return 200, ""
        if path == "/v2/repository/models/resnet/load":
            self.reload()
            return 200, ""
        return 404, {}


class Generic(InProcess):
    kind = "generic"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/running":
            return 200, {"requests": {"active": [1] * self.running, "done": self.completed}, "models/loaded": ["m"]}
        if path == "/unload":
            self.abort()
            self.act(self.free)
            return 200, ""
        if path == "/load":
            self.reload()
            return 200, ""
        return 404, {}
