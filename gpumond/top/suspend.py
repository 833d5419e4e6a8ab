"""Suspension of a program's device memory, or its resumption, after a confirmation; a suspension shows a plan first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gpumond.facts.errors import DaemonError
from gpumond.facts.suspension import SuspensionReceipt
from gpumond.facts.units import human
from gpumond.top.connection import DaemonClient, Requests
from gpumond.top.screen import Hints, Panel
from gpumond.view.frame import checked_as
from gpumond.view.rows import plain
from gpumond.view.text import Line, Span, wrapped

ANSWER_SECONDS = 3600.0
"""Longest wait for an answer: the memory is copied before it."""
PATHS = {"suspend": "/api/v1/suspensions", "resume": "/api/v1/resumptions"}


class SuspensionPanel(Panel):
    """``pid``: the program's. Nothing is moved before ``y`` is pressed."""

    closing = ("escape", "q", "n")

    def __init__(
        self, requests: Requests, daemon: DaemonClient, pid: int, name: str, action: Literal["suspend", "resume"]
    ) -> None:
        super().__init__()
        self.requests, self.daemon, self.pid, self.name, self.action = requests, daemon, pid, name, action
        self.results: list[str] = []
        self.ready = action == "resume"
        if not self.ready:
            self._ask(dry_run=True)

    @property
    def hints(self) -> Hints:
        return (("y", f"Yes, {self.action}"), ("esc", "No")) if self.ready else super().hints

    def press(self, key: str) -> None:
        if key == "y" and self.ready:
            self.ready = False
            self._ask(dry_run=False)

    def _ask(self, dry_run: bool) -> None:
        self.results = ["waiting for the daemon"]
        body: dict[str, object] = {"target": {"pid": self.pid}} | ({"dry_run": True} if dry_run else {})

        def question() -> Any:
            answer = self.daemon.post(PATHS[self.action], body, ANSWER_SECONDS)
            return checked_as(tuple[SuspensionReceipt, ...], answer["receipts"], "receipts")

        def receive(receipts: Any) -> None:
            if isinstance(receipts, DaemonError):
                self.results = [plain(str(receipts), 600)]
                return
            self.results = [_result(each) for each in receipts]
            self.ready = dry_run and any(each["outcome"] == "planned" for each in receipts)

        self.requests.ask(question, receive)

    def lines(self, width: int) -> list[Line]:
        lines: list[Line] = [[Span(f"{self.action} {self.name}", "bold")], []]
        for result in self.results:
            lines += wrapped([Span(result)], width)
        if self.ready:
            lines += [[], [Span(f"{self.action.capitalize()} it? y: yes  esc: no", "bold")]]
        return lines


def _result(receipt: Mapping[str, Any]) -> str:
    size = receipt["released_bytes"] if receipt["released_bytes"] is not None else receipt["expected_bytes"]
    words = [plain(receipt["outcome"], 20), "" if size is None else human(size)]
    reasons = [plain(receipt[name], 400) for name in ("reason", "remedy") if receipt[name]]
    return ": ".join([" ".join(filter(None, words)), *filter(None, ["; ".join(reasons)])])
