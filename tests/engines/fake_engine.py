"""Fakes of serving engines: real processes with a real port, whose memory is on a simulated device.

    python -m tests.engines.fake_engine KIND --card DIR [--port-file FILE] [--fault NAME]...

Each answers as facts about its engine state, also where that is harmful. ``harms`` counts what a careful caller must
never cause: a request that was cut, a model that a read loaded, a token that a probe generated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.engines.fake_base import Engine, Holder, Response
from tests.engines.fake_kinds import A1111, ComfyUi, Generic, LmDeploy, SgLang, TensorRtLlm, Triton
from tests.helpers.agents import GIB


class Ollama(Engine):
    """Its list of models says nothing about requests; one that has ended extends the time of its model."""

    kind = "ollama"

    def start(self) -> None:
        self.runners = {"llama3:8b": Holder(self.card, 4 * GIB)}
        self.options = {"llama3:8b": {"num_ctx": 8192, "keep_alive": -1 if "pinned" in self.faults else 300}}

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
        if path == "/api/generate" and "embedding" in self.faults:
            return 400, {"error": f'"{body["model"]}" does not support generate'}
        if path in ("/api/generate", "/api/embed"):
            name = body["model"]
            options = {"num_ctx": body.get("options", {}).get("num_ctx", 4096)}
            self.options[name] = options | {"keep_alive": body.get("keep_alive", 300)}
            if name not in self.runners:
                self.runners[name] = Holder(self.card, 4 * GIB)
            return 200, {"done": True, "done_reason": "load"}
        return 404, {}

    def listed(self, name: str) -> dict[str, Any]:
        options = self.options[name]
        year = 2318 if options["keep_alive"] < 0 else 2000 if "expired" in self.faults else 2126
        return {
            "name": name,
            "model": name,
            "size": 5 * GIB,
            "size_vram": 4 * GIB,
            "expires_at": f"{year}-11-22T10:00:{self.completed:02}.512345678+01:00",
            "context_length": options["num_ctx"],
        }


class LlamaRouter(Engine):
    kind = "llama-router"

    def start(self) -> None:
        self.children = {"qwen": Holder(self.card, 4 * GIB)}
        status = next((name for name in ("loading", "sleeping") if name in self.faults), "loaded")
        self.status = {"qwen": status, "other": "unloaded"}

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/models" and method == "GET":
            data = [
                {"id": name, "aliases": [f"{name}-alias"], "status": {"value": value}}
                for name, value in self.status.items()
            ]
            return 200, {"object": "list", "data": data}
        if path in ("/metrics", "/props", "/slots") and query.get("autoload") != "false":
            self.harms.append(f"{path} loads a model")
            return 200, ""
        if path == "/metrics":
            if self.status.get(query["model"]) != "loaded":
                return 400, {"error": "model is not running"}
            if "no-metrics" in self.faults:
                return 501, {"error": {"message": "This server does not support metrics endpoint"}}
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
            if body["model"] in self.children:
                return 400, {"error": {"message": "model is already running"}}
            self.children[body["model"]] = Holder(self.card, 4 * GIB)
            self.status[body["model"]] = "loaded"
            return 200, {"success": True}
        return 404, {}


class Vllm(Engine):
    """vLLM 0.33. ``released`` are the tags that its executor regards as released, ``unmapped`` those that are."""

    kind = "vllm"
    weights, kv_cache, rest = 2 * GIB, 4 * GIB, GIB

    def start(self) -> None:
        self.worker = Holder(self.card, self.weights + self.kv_cache + self.rest)
        self.released: set[str] = set()
        self.unmapped: set[str] = set()
        self.wakes = 0
        if "paused" in self.faults:
            self.paused = True

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        if path == "/metrics":
            return 200, self.page()
        if "no-dev-mode" in self.faults:
            return 404, {"detail": "Not Found"}
        if path == "/server_info":
            enabled = "no-sleep-mode" not in self.faults
            return 200, {"vllm_config": {"model_config": {"enable_sleep_mode": enabled}}}
        if path == "/is_sleeping":
            return 200, {"is_sleeping": bool(self.released) or self.paused}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path == "/pause":
            self.paused = True
            if query.get("mode") != "wait":
                self.abort()
            if "pause-hangs" in self.faults:
                threading.Event().wait()
            self.drained()
            return 200, {"status": "paused"}
        if path == "/resume":
            if self.running and "data-parallel" in self.faults:
                return 500, {"error": "Failed to resume generation: a pause is in progress"}
            if self.unmapped:
                self.harms.append("resumed without memory")
            self.paused = False
            return 200, {"status": "resumed"}
        if path in ("/release_kv_cache_memory", "/sleep"):
            return self.sleep(path, query)
        if path == "/wake_up":
            self.wakes += 1
            if self.wakes <= self.faults.count("wake-fails"):
                return 500, {"error": {"message": "Call to wake_up method failed: out of memory"}}
            if "wake-ends" in self.faults:
                os.kill(os.getpid(), signal.SIGKILL)
            tags = {query["tags"]} if "tags" in query else {"weights", "kv_cache"}
            for tag in tags & self.unmapped:
                self.worker.allocate(getattr(self, tag))
            self.unmapped -= tags
            self.released -= tags
            self.paused = bool(self.released) or (self.paused and bool(self.running))
            return 200, {"status": "sleeping" if self.released else "awake", "tags": None}
        return 404, {"detail": "Not Found"}

    def page(self) -> str:
        process = "# HELP x y\nprocess_open_fds 24.0\n"
        if "no-stats" in self.faults:  # --disable-log-stats
            return process
        values = {
            "vllm__num_requests_running": self.running,
            "vllm__num_requests_waiting": 0,
            "vllm__kv_cache_usage_perc": 0.04,
            "vllm__generation_tokens_total": 100 * self.completed,
        }
        slept = {"awake": not self.released, "weights_offloaded": "weights" in self.released, "discard_all": False}
        return (
            process
            + self.metrics(**values)
            + "".join(
                f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {float(value)}\n'
                for name, value in slept.items()
            )
        )

    def sleep(self, path: str, query: dict[str, str]) -> Response:
        tags = {"kv_cache"} if path == "/release_kv_cache_memory" else {"weights", "kv_cache"}
        if path == "/release_kv_cache_memory" and (not self.paused or self.running or self.released):
            return 500, {"error": "release requires a completed pause, and all executor memory to be resident"}
        if path == "/sleep" and query.get("mode") != "wait":
            self.abort()
        if path == "/sleep" and query.get("level") == "2":
            self.harms.append("weights lost")
        self.paused = True
        self.released |= tags
        if "rejects" in self.faults:  # in the worker: the executor keeps the tags
            return 500, {"error": {"message": "Call to release_kv_cache_memory method failed"}}
        size = sum(getattr(self, tag) for tag in tags - self.unmapped)

        def release() -> None:
            self.worker.free(size)
            self.unmapped |= tags

        self.act(release)
        return 200, {"status": "kv_cache_released"} if len(tags) == 1 else {"status": "sleeping", "level": 1}


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
