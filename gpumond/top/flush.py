"""A flush in three steps: plan, confirmation, receipts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from textual.binding import Binding, BindingType

from gpumond.errors import DaemonError
from gpumond.model.units import human
from gpumond.top.connection import DaemonClient, ask
from gpumond.top.panel import Panel
from gpumond.top.rows import plain

TIMEOUT_SECONDS = 30.0
ANSWER_SECONDS = 20 * TIMEOUT_SECONDS + 30
"""Time limit of a flush request; programs are flushed one after another."""

UNAUTHORIZED = 401


class PanelText(NamedTuple):
    text: Text
    ready: bool
    """True if a flush would release memory and may be requested."""


class FlushPanel(Panel):
    """The panel of a flush. Nothing is flushed before the plan is shown and ``y`` is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "confirm", "Yes, flush"),
        Binding("n", "dismiss", show=False),
    ]

    def __init__(self, daemon: DaemonClient, target: Mapping[str, object], name: str) -> None:
        super().__init__()
        self.daemon, self.target, self.target_name = daemon, target, name
        self.ready = False
        self.plan = ""
        """Id of the plan that is shown."""

    def on_mount(self) -> None:
        self._show(PanelText(Text(f"{self.target_name}: requesting the plan of a flush"), False))
        self._ask(dry_run=True)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.ready if action == "confirm" else True

    def action_confirm(self) -> None:
        self._show(PanelText(Text(f"{self.target_name}: flushing"), False))
        self._ask(dry_run=False)

    def _ask(self, dry_run: bool) -> None:
        body = {"target": self.target, "dry_run": dry_run, "timeout_seconds": TIMEOUT_SECONDS}
        if self.plan and not dry_run:
            body["plan"] = self.plan

        def question() -> PanelText:
            try:
                answer = self.daemon.post("/api/v1/flushes", body, ANSWER_SECONDS)
            except DaemonError as error:
                if "receipts" not in error.problem:
                    raise
                answer = error.problem  # only some of the programs answered in time
            self.plan = str(answer.get("id", ""))
            return plan(self.target_name, answer) if dry_run else proof(self.target_name, answer)

        ask(self.app, question, self._show)

    def _show(self, answer: PanelText | DaemonError) -> None:
        if isinstance(answer, DaemonError):
            remedy = "; set a token with GPUMOND_TOKEN" if answer.status == UNAUTHORIZED else ""
            answer = PanelText(Text(plain(f"{self.target_name}: not flushed: {answer}{remedy}", 600)), False)
        if not self.is_attached:  # the panel was closed, which does not cancel a flush
            self.app.notify(answer.text.plain, markup=False)
            return
        self.set_text(answer.text)
        self.ready = answer.ready
        self.refresh_bindings()


def plan(target: str, answer: Mapping[str, Any]) -> PanelText:
    ready = any(receipt["outcome"] == "planned" and receipt["expected"]["high"] for receipt in answer["receipts"])
    text = Text(f"{target}: plan of a flush\n\n")
    for receipt in answer["receipts"]:
        text.append(f"  {_planned(receipt)}\n")
    text.append("\nFlush? y: yes  esc: no" if ready else "\nNothing to release.", "bold")
    return PanelText(text, ready)


def _planned(receipt: Mapping[str, Any]) -> str:
    expected = receipt["expected"]
    if receipt["outcome"] != "planned":
        return _ended(receipt)
    if not expected["high"]:
        return f"{_program(receipt)} would release nothing"
    low, likely, high = (human(expected[name]) for name in ("low", "likely", "high"))
    between = "" if expected["low"] == expected["high"] else f", between {low} and {high}"
    return f"{_program(receipt)} would release about {likely}{between}"


def proof(target: str, answer: Mapping[str, Any]) -> PanelText:
    """Return the text of the receipts: released bytes as measured by the allocator and by the driver."""
    text = Text(f"{target}: receipts\n\n")
    for receipt in answer["receipts"]:
        text.append(f"  {_ended(receipt)}\n")
    text.append(f"\nreleased {human(answer['released_bytes'])}", "bold")
    return PanelText(text, False)


def _ended(receipt: Mapping[str, Any]) -> str:
    summary = [f"{_program(receipt)}: {plain(receipt['outcome'], 20)}"]
    if planned := receipt.get("planned"):
        summary.append(f"{human(planned['likely'])} planned")
    if receipt["released_bytes"] and receipt["expected"]:
        summary.append(f"{human(receipt['released_bytes'])} of {human(receipt['expected']['likely'])} expected")
    elif receipt["released_bytes"]:
        summary.append(human(receipt["released_bytes"]))
    if receipt["driver_released_bytes"] is not None:
        summary.append(f"the driver measured {human(receipt['driver_released_bytes'])}")
    if receipt["raced"]:
        summary.append("the program allocated during the flush")
    if receipt["reason"]:
        summary.append(plain(receipt["reason"]))
    return ", ".join([*summary, f"{receipt['duration_seconds']:.2f} s"])


def _program(receipt: Mapping[str, Any]) -> str:
    allocator = f" {plain(receipt['allocator'], 20)}" if receipt["allocator"] else ""
    return f"{plain(receipt['workload'] or '?', 64)} (pid {receipt['pid']}){allocator}"
