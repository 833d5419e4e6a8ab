"""Extension of IPython and Jupyter: ``%load_ext gpumond.jupyter``.

It allows the daemon to suspend the kernel while no cell runs, and resumes it before the next cell runs. The cell states
what it waits for.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import gpumond.agent
from gpumond.cli import client
from gpumond.facts.errors import GpumondError
from gpumond.facts.units import size_text

WAIT_SECONDS = 3600.0
RESPONSE_TIMEOUT_SECONDS = 600.0
"""Time for an answer in addition to the wait: a restore takes as long as a copy of the memory."""
SECOND_CHECK_SECONDS = 5.0
"""Time from a cell's start to a second look: the daemon may have suspended the kernel at the same moment."""
RETRY_SECONDS = 60.0
"""Time for which no cell asks a daemon that did not answer."""


class Notebook:
    """The state of one kernel. ``url``: the daemon's address."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._next_attempt_at = 0.0
        self._second_check: threading.Timer | None = None

    def before_cell(self, info: Any = None) -> None:
        """Resume the kernel if it is suspended, and return when it is."""
        gpumond.agent.start(suspendable=False)
        self.resume()
        self._second_check = threading.Timer(SECOND_CHECK_SECONDS, self.resume)
        self._second_check.daemon = True
        self._second_check.start()

    def after_cell(self, result: Any = None) -> None:
        """Allow suspensions until the next cell."""
        if self._second_check is not None:
            self._second_check.cancel()
        gpumond.agent.start(suspendable=True)

    def resume(self) -> None:
        """Resume the kernel if it is suspended, and print what it waits for."""
        try:
            if time.monotonic() < self._next_attempt_at or not (suspension := self._fetch_suspension()):
                return
            started_at = time.monotonic()
            size = size_text(sum(each["used_bytes"] for each in suspension["memory"]))
            print(f"gpumond: this notebook is {suspension['state']}; moving its {size} back to the GPU…", flush=True)
            for wait_seconds in (0.0, WAIT_SECONDS):
                receipt = self._request_resumption(wait_seconds)
                if receipt["outcome"] != "refused":
                    break
                print(f"gpumond: waiting: {receipt['reason']}", flush=True)
            seconds = time.monotonic() - started_at
            reason = f": {receipt['reason']}" if receipt["reason"] else ""
            print(f"gpumond: {receipt['outcome']} after {seconds:.1f} s{reason}", flush=True)
        except GpumondError as error:
            self._next_attempt_at = time.monotonic() + RETRY_SECONDS
            if getattr(error, "status", 0):
                print(f"gpumond: {error}", flush=True)

    def _fetch_suspension(self) -> Any:
        """Return the state of this kernel, None if it is not suspended. Raises DaemonError."""
        programs = client.get(self._url, "/api/v1/suspensions")
        return next((each for each in programs if each["pid"] == os.getpid()), None)

    def _request_resumption(self, wait_seconds: float) -> Any:
        body = {"target": {"pid": os.getpid()}, "wait_seconds": wait_seconds}
        (receipt,) = client.post(self._url, "/api/v1/resumptions", body, wait_seconds + RESPONSE_TIMEOUT_SECONDS)[
            "receipts"
        ]
        return receipt


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext``."""
    notebook = Notebook(client.default_url())
    shell.events.register("pre_run_cell", notebook.before_cell)
    shell.events.register("post_run_cell", notebook.after_cell)
    shell.gpumond = notebook


def unload_ipython_extension(shell: Any) -> None:
    """Called by ``%unload_ext``. The daemon may no longer suspend the kernel."""
    notebook: Notebook = shell.gpumond
    shell.events.unregister("pre_run_cell", notebook.before_cell)
    shell.events.unregister("post_run_cell", notebook.after_cell)
    notebook.after_cell()
    gpumond.agent.start(suspendable=False)
