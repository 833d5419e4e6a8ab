"""Stand-ins of serving engines: real processes with a real port, whose memory is on a simulated device.

    python -m tests.engines.standin KIND --card DIR [--port-file FILE] [--fault NAME]...

Each answers as facts about its engine state, also where that is harmful. ``harms`` counts what a careful caller must
never cause: a request that was cut, a model that a read loaded, a token that a probe generated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from gpumond.sim.device import SimDevice
from gpumond.testing import GIB

HOLDER = """
import sys
from gpumond.sim.device import SimDevice
context = SimDevice(sys.argv[1]).attach()
for line in sys.stdin:
    word, size = line.split()
    (context.allocate if word == "allocate" else context.free)(int(size))
    print("done", flush=True)
"""
Response = tuple[int, Any]


class Holder:
    """A child process that holds memory of the engine."""

    def __init__(self, card: str, size: int) -> None:
        command = [sys.executable, "-c", HOLDER, card]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.size = 0
        self.allocate(size)

    def _command(self, word: str, size: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{word} {size}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def allocate(self, size: int) -> None:
        self._command("allocate", size)
        self.size += size

    def free(self, size: int) -> None:
        self._command("free", size)
        self.size -= size

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
        self.size = 0


class Engine:
    """What all stand-ins share: requests in flight, faults, and the record of calls."""

    kind: ClassVar[str]

    def __init__(self, card: str, faults: list[str]) -> None:
        self.card, self.faults = card, faults
        self.lock = threading.RLock()
        self.running = 0
        self.completed = 0
        self.harms: list[str] = []
        self.calls: list[str] = []
        self.paused = False
        self.finish = threading.Event()
        self.cut = threading.Event()
        self.start()

    def start(self) -> None:
        """Allocate the memory."""

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        raise NotImplementedError

    def request(self) -> Response:
        """Serve one inference request until the test finishes it, or the engine cuts it."""
        if self.paused:
            return 503, {"error": "paused"}
        with self.lock:
            self.running += 1
        while not self.finish.wait(0.01):
            if self.cut.is_set():
                with self.lock:
                    self.running -= 1
                    self.harms.append("request cut")
                return 500, {"error": "aborted"}
        with self.lock:
            self.running -= 1
            self.completed += 1
        return 200, {"text": "done"}

    def drained(self) -> None:
        while self.running:
            time.sleep(0.01)

    def abort(self) -> None:
        """End running requests, as an engine without a drain does."""
        if self.running:
            self.cut.set()
            self.drained()
            self.cut.clear()

    def act(self, release: Callable[[], None]) -> None:
        """Release as the faults say: never, later, or with the end of the server."""
        if "hang" in self.faults:
            threading.Event().wait()
        if "die" in self.faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if "lie" in self.faults:
            return
        if "late" in self.faults:
            threading.Timer(0.5, release).start()
        else:
            release()

    def metrics(self, **values: float) -> str:
        return "".join(f'{name.replace("__", ":")}{{model_name="m"}} {value}\n' for name, value in values.items())


class Ollama(Engine):
    kind = "ollama"

    def start(self) -> None:
        self.runners = {"llama3:8b": Holder(self.card, 4 * GIB)}
        self.expiry = 1
        if "pinned" in self.faults:
            self.expiry = -1

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/api/ps":
            return 200, {"models": [self.listed(name) for name in self.runners]}
        if path == "/api/generate" and body.get("keep_alive") == 0 and "prompt" not in body:
            runner = self.runners.get(body["model"])

            def unload() -> None:
                self.drained()
                if runner is not None:
                    runner.end()
                self.runners.pop(body["model"], None)

            threading.Thread(target=self.act, args=(unload,), daemon=True).start()
            if "hang" in self.faults:
                threading.Event().wait()
            return 200, {"done": True, "done_reason": "unload", "response": ""}
        if path == "/api/generate":
            self.expiry += 1
            if body["model"] not in self.runners:
                self.runners[body["model"]] = Holder(self.card, 4 * GIB)
            return 200, {"done": True, "done_reason": "load"}
        return 404, {}

    def listed(self, name: str) -> dict[str, Any]:
        year = 2318 if self.expiry < 0 else 2026
        return {
            "name": name,
            "model": name,
            "size": 5 * GIB,
            "size_vram": 4 * GIB,
            "expires_at": f"{year}-11-22T10:00:{abs(self.expiry + self.completed):02}.5+01:00",
            "context_length": 8192,
        }


class LlamaRouter(Engine):
    kind = "llama-router"

    def start(self) -> None:
        self.children = {"qwen": Holder(self.card, 4 * GIB)}
        self.status = {"qwen": "loading" if "loading" in self.faults else "loaded", "other": "unloaded"}

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/models" and method == "GET":
            data = [{"id": name, "status": {"value": value}} for name, value in self.status.items()]
            return 200, {"object": "list", "data": data}
        if path in ("/metrics", "/props", "/slots") and query.get("autoload") != "false":
            self.harms.append(f"{path} loads a model")
            return 200, ""
        if path == "/metrics":
            if self.status.get(query["model"]) != "loaded":
                return 400, {"error": "model is not running"}
            running = self.running
            values = {"llamacpp__requests_processing": running, "llamacpp__requests_deferred": 0}
            return 200, self.metrics(**values, llamacpp__tokens_predicted_total=10 * self.completed)
        if path == "/models/unload":
            if body["model"] not in self.children:
                return 400, {"error": {"message": "model is not running"}}

            def unload() -> None:
                self.abort()  # the child is ended, whatever it does
                self.children.pop(body["model"]).end()
                self.status[body["model"]] = "unloaded"

            self.act(unload)
            return 200, {"success": True}
        if path == "/models/load":
            self.children[body["model"]] = Holder(self.card, 4 * GIB)
            self.status[body["model"]] = "loaded"
            return 200, {"success": True}
        return 404, {}


class InProcess(Engine):
    """An engine whose own process holds the memory."""

    held = 4 * GIB
    rest = GIB

    def start(self) -> None:
        self.memory = SimDevice(self.card).attach()
        self.memory.allocate(self.held)
        self.asleep = False

    def free(self) -> None:
        if not self.asleep:
            self.asleep = True
            self.memory.free(self.held - self.rest)

    def reload(self) -> None:
        if self.asleep:
            self.memory.allocate(self.held - self.rest)
            self.asleep = False


class ComfyUi(InProcess):
    kind = "comfyui"

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/queue":
            return 200, {"queue_running": [["prompt"]] * self.running, "queue_pending": []}
        if path == "/system_stats":
            total = self.rest if self.asleep else self.held
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


class Vllm(Engine):
    kind = "vllm"
    weights, kv_cache, rest = 2 * GIB, 4 * GIB, GIB

    def start(self) -> None:
        self.worker = Holder(self.card, self.weights + self.kv_cache + self.rest)
        self.released: set[str] = set()

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/metrics":
            awake = not self.released
            values = {
                "vllm__num_requests_running": self.running,
                "vllm__num_requests_waiting": 0,
                "vllm__kv_cache_usage_perc": 0.04,
                "vllm__generation_tokens_total": 100 * self.completed,
            }
            state = "".join(
                f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {float(value)}\n'
                for name, value in (("awake", awake), ("weights_offloaded", not awake))
            )
            return 200, "# HELP x y\n" + self.metrics(**values) + state
        if "no-dev-mode" in self.faults:
            return 404, {"detail": "Not Found"}
        if path == "/server_info":
            enabled = "no-sleep-mode" not in self.faults
            return 200, {"vllm_config": {"model_config": {"enable_sleep_mode": enabled}}}
        if path == "/is_sleeping":
            return 200, {"is_sleeping": bool(self.released) or self.paused}
        if path == "/pause":
            self.paused = True
            if query.get("mode") != "wait":
                self.abort()
            if "pause-hangs" in self.faults:
                threading.Event().wait()
            self.drained()
            return 200, {"status": "paused"}
        if path == "/resume":
            self.paused = False
            return 200, {"status": "resumed"}
        if path in ("/release_kv_cache_memory", "/sleep"):
            return self.sleep(path, query)
        if path == "/wake_up":
            if not self.released:
                self.harms.append("woken without a sleep")
            tags = {query["tags"]} if "tags" in query else {"weights", "kv_cache"}
            for tag in tags & self.released:
                self.worker.allocate(getattr(self, tag))
            self.released -= tags
            self.paused = bool(self.released)
            return 200, {"status": "awake", "tags": None}
        return 404, {"detail": "Not Found"}

    def sleep(self, path: str, query: dict[str, str]) -> Response:
        if "rejects" in self.faults:
            return 500, {"error": "release requires a completed pause first"}
        if path == "/release_kv_cache_memory" and (not self.paused or self.running):
            return 500, {"error": "release requires a completed pause first"}
        if path == "/sleep" and query.get("mode") != "wait":
            self.abort()
        tags = {"kv_cache"} if path == "/release_kv_cache_memory" else {"weights", "kv_cache"}
        if path == "/sleep" and query.get("level") == "2":
            self.harms.append("weights lost")

        size = sum(getattr(self, tag) for tag in tags - self.released)

        def release() -> None:
            self.worker.free(size)

        self.act(release)
        self.released |= tags
        if "lie" in self.faults:
            self.released = set()
        return 200, {"status": "kv_cache_released"} if len(tags) == 1 else {"status": "sleeping", "level": 1}


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
            return 200, self.metrics(**values, sglang__weight_memory_usage_gb=1.5, sglang__kv_cache_memory_usage_gb=2.5)
        if path == "/v1/loads":
            return 200, {"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 2}]}
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            os.kill(os.getpid(), signal.SIGKILL)
        return 404, {}


class TensorRtLlm(InProcess):
    kind = "tensorrt-llm"
    nonces: ClassVar[set[str]] = set()

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        state = "failed" if "failed" in self.faults else "parked" if self.asleep else "running"
        if path == "/memory_status":
            return 200, {"state": state, "parked_tags": ["kv_cache"] if self.asleep else []}
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
            return 200, {"is_sleeping": self.asleep}
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
            state = "UNAVAILABLE" if self.asleep else "READY"
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


KINDS = {
    each.kind: each
    for each in (Ollama, LlamaRouter, ComfyUi, A1111, Vllm, SgLang, TensorRtLlm, LmDeploy, Triton, Generic)
}


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            body = json.loads(raw) if raw else None
            parts = urlsplit(self.path)
            path, query = unquote(parts.path), {key: values[0] for key, values in parse_qs(parts.query).items()}
            if path == "/_test/request":
                status, answer = engine.request()
            elif path == "/_test/finish":
                engine.finish.set()
                status, answer = 200, {}
            elif path == "/_test":
                record = {"harms": engine.harms, "calls": engine.calls, "running": engine.running}
                status, answer = 200, record | {"completed": engine.completed, "paused": engine.paused}
            else:
                engine.calls.append(f"{self.command} {self.path}")
                assert "Origin" not in self.headers
                if "silent" in engine.faults:
                    threading.Event().wait()
                if "redirect" in engine.faults:
                    self.send_response(302)
                    self.send_header("Location", "http://127.0.0.1:1/")
                    self.end_headers()
                    return
                status, answer = engine.call(self.command, path, query, body)
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = serve

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0

    def get_request(self) -> tuple[Any, Any]:
        connection, _ = self.socket.accept()
        return connection, ("", 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--card", required=True)
    parser.add_argument("--socket")
    parser.add_argument("--fault", action="append", default=[])
    arguments = parser.parse_args()
    engine = KINDS[arguments.kind](arguments.card, arguments.fault)
    handler = handler_of(engine)
    if arguments.socket:
        Path(arguments.socket).unlink(missing_ok=True)
        server: ThreadingHTTPServer = UnixServer(arguments.socket, handler)  # type: ignore[arg-type]
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    url = f"unix:{arguments.socket}" if arguments.socket else f"http://127.0.0.1:{server.server_port}"
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with the test
    server.serve_forever()


if __name__ == "__main__":
    main()
