"""Dialogs: a flush in three steps (plan, confirmation, receipts); a suspension, a resumption, a silence or a signal
after a confirmation; the choice of columns. Each shows itself in its ``panel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from gpumond.cli.client import UNPROCESSABLE, with_commands
from gpumond.facts.alerts import ENDED_PREFIX
from gpumond.facts.errors import DaemonError
from gpumond.facts.frame import Alert
from gpumond.facts.suspension import SuspensionReceipt
from gpumond.facts.units import duration_text, plural, size_text
from gpumond.top.connection import DaemonClient, Requests
from gpumond.top.processes import COLUMNS, SIGNALS, ProcessList, save_columns, send_signal, signal_refusal
from gpumond.top.screen import Hints, Panel, entry_line
from gpumond.view.frame import checked_as, receipts_of
from gpumond.view.live_memory import why_lines
from gpumond.view.rows import ProcessRow, difference_sentences, sort_by_urgency
from gpumond.view.text import Span, StyledLine, cut, fitting_columns, printable_excerpt, table_lines as table, wrap_line

TIMEOUT_SECONDS = 30.0
RESPONSE_SECONDS = 20 * TIMEOUT_SECONDS + 30
"""Time limit of a flush request; programs are flushed one after another."""

PLAN_COLUMNS = (">PID", "PROGRAM", "OUTCOME", ">WOULD RELEASE", ">AT LEAST", ">AT MOST")
EXACT_COLUMNS = len(PLAN_COLUMNS) - 2
"""Columns of a plan without bounds, which are equal to a prediction that is exact at this moment."""
HIDEABLE = (">TOOK", ">EXPECTED", ">PLANNED", ">AT LEAST", ">AT MOST", ">PID", ">DRIVER", "OUTCOME")
"""Columns that a narrow screen does not show, in the order in which they are left out."""
RECEIPT_COLUMNS = (">PID", "PROGRAM", ">PLANNED", ">EXPECTED", ">RELEASED", ">DRIVER", ">TOOK", "OUTCOME")


def selection_keys(step: Callable[[int], None]) -> Mapping[str, Callable[[], None]]:
    """Return the keys that select the entry before or after in a list."""
    keys = {"up": -1, "k": -1, "left": -1, "down": 1, "j": 1, "right": 1}
    return {key: partial(step, by) for key, by in keys.items()}


class FlushTarget(NamedTuple):
    """``body``: the target of a request to the daemon."""

    daemon: DaemonClient
    body: Mapping[str, object]
    name: str


class ReceiptRow(NamedTuple):
    """A receipt of a plan or a flush, as rows of the two tables. ``likely_bytes``: what a plan would release; None if
    unknown. ``is_exact``: it has no bounds.
    """

    plan_cells: Sequence[str]
    receipt_cells: Sequence[str]
    remark: str
    releases_memory: bool
    likely_bytes: int | None
    is_exact: bool


class FlushResponse(NamedTuple):
    """The answer for one target: ``problem`` is empty if there are receipts. ``id`` is that of the plan."""

    target: FlushTarget
    receipts: Sequence[ReceiptRow] = ()
    released_bytes: int = 0
    id: str = ""
    problem: str = ""


class FlushDialog:
    """Nothing is flushed before the plan is shown and ``y`` is pressed.

    ``on_done`` is called with a summary of the receipts, also if the panel is no longer shown.
    """

    def __init__(
        self, requests: Requests, targets: Sequence[FlushTarget], name: str, on_done: Callable[[str], None]
    ) -> None:
        self.panel = Panel(self._lines, ("n",), {"y": self._confirm}, self._hints)
        self.requests, self.targets, self.name, self.on_done = requests, targets, name, on_done
        self.state = "requesting a flush plan"
        self.answers: Sequence[FlushResponse] = ()
        self.confirmable = False
        self._ask(dry_run=True)

    def _hints(self) -> Hints:
        return (("y", "Yes, flush"), ("esc", "No")) if self.confirmable else ()

    def _confirm(self) -> None:
        if self.confirmable:
            self.confirmable, self.state = False, "flushing"
            self._ask(dry_run=False)

    def _ask(self, dry_run: bool) -> None:
        before = self.answers
        targets = [
            answer.target for answer in before if any(each.releases_memory for each in answer.receipts)
        ] or self.targets
        plans = {id(answer.target): answer.id for answer in before}

        def fetch() -> list[FlushResponse]:
            return [_request_flush(target, dry_run, plans.get(id(target), "")) for target in targets]

        def receive(answers: list[FlushResponse] | DaemonError) -> None:
            self.answers = (
                [FlushResponse(self.targets[0], problem=str(answers))] if isinstance(answers, DaemonError) else answers
            )
            self.state = "flush plan" if dry_run else "receipts"
            self.confirmable = dry_run and any(each.releases_memory for each in _receipt_rows(self.answers))
            if not dry_run:
                self.on_done(f"{self.name}: {self._summary()}")

        self.requests.ask(fetch, receive)

    def _summary(self) -> str:
        problems = [answer.problem for answer in self.answers if answer.problem]
        if problems and len(problems) == len(self.answers):
            return f"not flushed: {problems[0]}"
        return f"released {size_text(sum(answer.released_bytes for answer in self.answers))}"

    def _lines(self, width: int) -> list[StyledLine]:
        lines: list[StyledLine] = [[Span(f"{self.name}: {self.state}", "bold")], []]
        receipts = [*_receipt_rows(self.answers)]
        planned = self.state != "receipts"
        if planned:
            receipts.sort(key=lambda each: -(each.likely_bytes or 0))
        if receipts:
            exact = all(each.is_exact for each in receipts)
            rows = [
                each.plan_cells[: EXACT_COLUMNS if exact else None] if planned else each.receipt_cells
                for each in receipts
            ]
            header = (PLAN_COLUMNS[:EXACT_COLUMNS] if exact else PLAN_COLUMNS) if planned else RECEIPT_COLUMNS
            shown, cells, _ = fitting_columns(header, rows, width, HIDEABLE)
            lines += [[Span(line)] for line in table(shown, cells, width)]
        for answer in self.answers:
            if answer.problem:
                lines += wrap_line([Span(f"{answer.target.name}: not flushed: {answer.problem}")], width)
        for receipt in receipts:
            lines += wrap_line([Span(receipt.remark)], width) if receipt.remark else []
        return [*lines, [], *self._question()]

    def _question(self) -> Iterator[StyledLine]:
        if self.confirmable:
            sizes = [each.likely_bytes for each in _receipt_rows(self.answers) if each.releases_memory]
            known = [each for each in sizes if each is not None]
            amount = size_text(sum(known)) if len(known) == len(sizes) else "an unknown amount"
            yield [Span("The amount changes while the program runs.")]
            yield [Span(f"Flush {amount}? y: yes  esc: no", "bold")]
        elif self.state == "flush plan" and not any(answer.problem for answer in self.answers):
            yield [Span("Nothing to release.", "bold")]
        elif self.state == "receipts" and any(answer.receipts for answer in self.answers):
            yield [Span(self._summary(), "bold")]


def _request_flush(target: FlushTarget, dry_run: bool, plan: str) -> FlushResponse:
    body = {"target": target.body, "dry_run": dry_run, "timeout_seconds": TIMEOUT_SECONDS}
    if plan and not dry_run:
        body["plan"] = plan
    try:
        answer = target.daemon.post("/api/v1/flushes", body, RESPONSE_SECONDS)
    except DaemonError as error:
        if "receipts" not in error.problem:
            return FlushResponse(target, problem=printable_excerpt(error, 600))
        answer = error.problem  # only some of the programs answered in time
    receipts = receipts_of(answer)
    released = sum(receipt["released_bytes"] for receipt in receipts)
    return FlushResponse(target, [*map(_receipt_row, receipts)], released, str(answer.get("id", "")))


def _receipt_rows(answers: Iterable[FlushResponse]) -> Iterator[ReceiptRow]:
    return (receipt for answer in answers for receipt in answer.receipts)


def _receipt_row(receipt: Mapping[str, Any]) -> ReceiptRow:
    expected, driver = receipt["expected"], receipt["driver_released_bytes"]
    program = printable_excerpt(receipt["workload"] or "?", 64)
    if receipt["allocator"]:
        program += f" {printable_excerpt(receipt['allocator'], 20)}"
    subject, outcome = (str(receipt["pid"]), program), printable_excerpt(receipt["outcome"], 20)
    releases = bool(receipt["outcome"] == "planned" and expected and expected["high"])
    numbers = (
        _bound_text(receipt.get("planned"), "likely"),
        _bound_text(expected, "likely"),
        size_text(receipt["released_bytes"]),
        "-" if driver is None else size_text(driver),
        f"{receipt['duration_seconds']:.2f} s",
    )
    remark = "; ".join(filter(None, (printable_excerpt(receipt["reason"]), *difference_sentences(receipt))))
    return ReceiptRow(
        plan_cells=(*subject, outcome, *(_bound_text(expected, name) for name in ("likely", "low", "high"))),
        receipt_cells=(*subject, *numbers, outcome),
        remark=f"pid {receipt['pid']}: {remark}" if remark else "",
        releases_memory=releases,
        likely_bytes=expected["likely"] if releases else None,
        is_exact=not expected or expected["low"] == expected["likely"] == expected["high"],
    )


def _bound_text(estimate: Mapping[str, int] | None, bound: str) -> str:
    return size_text(estimate[bound]) if estimate and estimate[bound] is not None else "-"


COPY_SECONDS = 3600.0
"""Longest wait for an answer: the memory is copied before it."""
ROUTES = {"suspend": "/api/v1/suspensions", "resume": "/api/v1/resumptions"}


class SuspensionDialog:
    """``pid``: the program's. Nothing is moved before ``y`` is pressed."""

    def __init__(
        self, requests: Requests, daemon: DaemonClient, pid: int, name: str, action: Literal["suspend", "resume"]
    ) -> None:
        self.panel = Panel(self._lines, ("n",), {"y": self._confirm}, self._hints)
        self.requests, self.daemon, self.pid, self.name, self.action = requests, daemon, pid, name, action
        self.results: list[str] = []
        self.confirmable = False
        if action == "resume":
            self._check_suspended()
        else:
            self._ask(dry_run=True)

    def _hints(self) -> Hints:
        return (("y", f"Yes, {self.action}"), ("esc", "No")) if self.confirmable else ()

    def _confirm(self) -> None:
        if self.confirmable:
            self.confirmable = False
            self._ask(dry_run=False)

    def _check_suspended(self) -> None:
        """Ask whether the program is suspended: only then it can be resumed."""

        def receive(pids: set[int] | DaemonError) -> None:
            if isinstance(pids, DaemonError):
                self.results = [printable_excerpt(str(pids), 600)]
                return
            self.confirmable = self.pid in pids
            self.results = [] if self.confirmable else [f"{self.name} isn't suspended"]

        self.results = ["waiting for the daemon"]
        self.requests.ask(lambda: {int(each["pid"]) for each in self.daemon.get(ROUTES["suspend"])}, receive)

    def _ask(self, dry_run: bool) -> None:
        self.results = ["waiting for the daemon"]
        body: dict[str, object] = {"target": {"pid": self.pid}} | ({"dry_run": True} if dry_run else {})

        def fetch() -> Any:
            answer = self.daemon.post(ROUTES[self.action], body, COPY_SECONDS)
            return checked_as(tuple[SuspensionReceipt, ...], answer["receipts"], "receipts")

        def receive(receipts: Any) -> None:
            if isinstance(receipts, DaemonError):
                self.results = [printable_excerpt(str(receipts), 600)]
                return
            self.results = [_suspension_text(each) for each in receipts]
            self.confirmable = dry_run and any(each["outcome"] == "planned" for each in receipts)

        self.requests.ask(fetch, receive)

    def _lines(self, width: int) -> list[StyledLine]:
        lines: list[StyledLine] = [[Span(f"{self.action} {self.name}", "bold")], []]
        for result in self.results:
            lines += wrap_line([Span(result)], width)
        if self.confirmable:
            lines += [[], [Span(f"{self.action.capitalize()} it? y: yes  esc: no", "bold")]]
        return lines


def _suspension_text(receipt: Mapping[str, Any]) -> str:
    size = receipt["released_bytes"] if receipt["released_bytes"] is not None else receipt["expected_bytes"]
    words = [
        printable_excerpt(receipt["outcome"], 20),
        "" if size is None or receipt["outcome"] == "refused" else size_text(size),
    ]
    reasons = [printable_excerpt(receipt[name], 400) for name in ("reason", "remedy") if receipt[name]]
    return ": ".join([" ".join(filter(None, words)), *filter(None, ["; ".join(reasons)])])


def why_panel(requests: Requests, daemon: DaemonClient, row: ProcessRow) -> Panel:
    """Return the panel of what a program's live memory consists of, after its verdicts."""
    answer: list[str] = ["waiting for the program"]

    def fetch() -> list[str]:
        found = daemon.post(f"/api/v1/agents/{row.pid}/why", {}, TIMEOUT_SECONDS)
        record = with_commands(f"to see the lines that allocate: gpumond why --pid {row.pid} --record 30s", daemon.url)
        return [*why_lines(found, {row.key[0]: f"GPU {row.gpu}"}), *([] if found["sites"] else [record])]

    def receive(found: list[str] | DaemonError) -> None:
        answer[:] = [str(found)] if isinstance(found, DaemonError) else found

    def lines(width: int) -> list[StyledLine]:
        texts = [*row.verdicts, *answer]
        title = [Span(f"memory of {row.program} (pid {row.pid})", "bold")]
        return [title, *(line for text in texts for line in wrap_line([Span(printable_excerpt(text, 600))], width))]

    requests.ask(fetch, receive)
    return Panel(lines, ("w",))


SILENCES = "/api/v1/silences"
SILENCE_SECONDS = 3600.0
SUBJECT_LABELS = ("workload", "engine", "pid", "uuid")
"""A silence is of the rule and the first of these labels that the alert has, as in the web UI."""
NO_REASON = "not silenced: type a reason, or press esc"


class SilenceDialog:
    """The alerts that are not silenced: those of the process ``pid`` first, ended ones last. Enter chooses one, and
    after a reason silences it. One that is alone is chosen already. A refused reason stays.
    """

    def __init__(self, requests: Requests, daemon: DaemonClient, pid: int | None) -> None:
        self.panel = Panel(self._lines, (), {**selection_keys(self._select), "enter": self._enter}, self._hints)
        self.requests, self.daemon, self.pid = requests, daemon, pid
        self.alerts: list[Any] = []
        self.cursor = 0
        self.result = "waiting for the daemon"
        self.refused = ("", "")
        """The reason that was not accepted, and why not."""
        self.requests.ask(self._read, self._receive)

    def _hints(self) -> Hints:
        if self.panel.entry is not None:
            return ("enter", "Yes, silence"), ("esc", "No")
        return (("↑↓", "Alert"), ("enter", "Choose"), ("esc", "Close")) if self.alerts else ()

    def _read(self) -> list[Any]:
        found = checked_as(tuple[Alert, ...], self.daemon.get("/api/v1/alerts"), "alerts")
        urgent = [each for each, _ in sort_by_urgency(found, ()) if not each["silenced_by"]]
        if urgent:
            self._check_rights()
        return sorted(urgent, key=lambda each: (each["pid"] != self.pid, _summary(each).startswith(ENDED_PREFIX)))

    def _check_rights(self) -> None:
        """Raise DaemonError for a user who may not silence. To others, the daemon says that the request is empty."""
        try:
            self.daemon.post(SILENCES, {}, TIMEOUT_SECONDS)
        except DaemonError as error:
            if error.status != UNPROCESSABLE:
                raise

    def _receive(self, found: list[Any] | DaemonError) -> None:
        if isinstance(found, DaemonError):
            self.result = printable_excerpt(f"you can't silence alerts: {found}", 600)
            return
        self.alerts, self.result = found, "" if found else "no alert to silence"
        self.panel.entry = "" if len(found) == 1 else None

    def _select(self, step: int) -> None:
        if self.panel.entry is None:
            self.cursor = max(0, min(self.cursor + step, len(self.alerts) - 1))
            self.panel.revealed = self.cursor + 1, self.cursor + 1

    def _matchers(self) -> list[tuple[str, str]]:
        alert = self.alerts[self.cursor]
        labels = dict(alert["labels"])
        subject = next((name for name in SUBJECT_LABELS if labels.get(name)), "")
        return [("rule", alert["rule"]), *([(subject, labels[subject])] if subject else [])]

    def _subject(self) -> str:
        return " ".join(f"{name}={printable_excerpt(value, 80)}" for name, value in self._matchers())

    def _enter(self) -> None:
        if not self.alerts:
            return
        if self.panel.entry is None:
            self.panel.entry, self.panel.first_line = "", 0
            return
        alerts, typed = self.alerts, self.panel.entry
        reason = typed.strip()
        if not reason:
            self.refused = typed, NO_REASON
            return
        matchers = [{"name": name, "operator": "=", "value": value} for name, value in self._matchers()]
        subject = self._subject()
        body = {"matchers": matchers, "for_seconds": SILENCE_SECONDS, "reason": reason}

        def receive(answer: Any) -> None:
            if isinstance(answer, DaemonError):
                self.alerts, self.panel.entry = alerts, typed
                self.refused = typed, printable_excerpt(f"not silenced: {answer}", 600)
                return
            id = printable_excerpt(answer["silence"]["id"], 40)
            ends = with_commands(f"to end it: gpumond silence delete {id}", self.daemon.url)
            self.result = f"silence {id} of {subject} for {duration_text(SILENCE_SECONDS)}; {ends}"

        self.alerts, self.result, self.panel.entry = [], "waiting for the daemon", None
        self.requests.ask(lambda: self.daemon.post(SILENCES, body, TIMEOUT_SECONDS), receive)

    def _lines(self, width: int) -> list[StyledLine]:
        if not self.alerts:
            return wrap_line([Span(self.result)], width)
        if self.panel.entry is None:
            listed = enumerate("".join(_name_and_summary(each)) for each in self.alerts)
            rows = [[Span(cut(f" {text} ", width), "chosen" if at == self.cursor else "")] for at, text in listed]
            return [[Span("choose the alert to silence", "bold")], *rows]
        name, summary = _name_and_summary(self.alerts[self.cursor])
        return [
            *wrap_line([Span(name, "bold"), Span(summary)], width),
            [],
            *wrap_line([Span(f"Silence {self._subject()} for {duration_text(SILENCE_SECONDS)}?", "bold")], width),
            entry_line("reason", self.panel.entry, "required"),
            *wrap_line([Span(self.refused[1] if self.panel.entry == self.refused[0] else "", "bold")], width),
        ]


def _name_and_summary(alert: Mapping[str, Any]) -> tuple[str, str]:
    """Return the rule with the phase of an alert, and its summary, which itself says that the cause has ended."""
    rule, summary = printable_excerpt(alert["rule"], 60), printable_excerpt(_summary(alert), 400)
    if summary.startswith(ENDED_PREFIX):
        return f"{rule} ", summary
    return f"{rule} {printable_excerpt(alert['phase'], 20)}: ", summary


def _summary(alert: Mapping[str, Any]) -> str:
    return str(dict(alert["annotations"]).get("summary", ""))


class SignalDialog:
    """``rows``: processes, and whether their daemon may be on this machine. ``y`` sends the signal."""

    def __init__(self, rows: Sequence[tuple[ProcessRow, bool]]) -> None:
        self.panel = Panel(self._lines, ("n",), {**selection_keys(self._select), "y": self._confirm}, self._hints)
        self.rows = rows
        self.signal_index = 0
        self.results = [signal_refusal(row, local) for row, local in rows]
        self.confirmable = not all(self.results)

    def _hints(self) -> Hints:
        return (("←→", "Signal"), ("y", "Yes, send"), ("esc", "No")) if self.confirmable else ()

    def _select(self, step: int) -> None:
        self.signal_index = (self.signal_index + step) % len(SIGNALS)

    def _confirm(self) -> None:
        if self.confirmable:
            self.confirmable = False
            self.results = [send_signal(row, local, SIGNALS[self.signal_index]) for row, local in self.rows]

    def _lines(self, width: int) -> list[StyledLine]:
        lines: list[StyledLine] = []
        if self.confirmable:
            names = [Span(f" {name} ", "chosen" if at == self.signal_index else "") for at, name in enumerate(SIGNALS)]
            lines += [*wrap_line(names, width), []]
        for (row, _), result in zip(self.rows, self.results, strict=True):
            text = f": {'no signal: ' if self.confirmable else ''}{result}" if result else ""
            lines += wrap_line([Span(f"{row.program} (pid {row.pid})", "bold"), Span(text)], width)
        if self.confirmable:
            programs = plural(self.results.count(""), "program")
            question = f"Send {SIGNALS[self.signal_index]} to {programs}? y: yes  esc: no"
            lines += [[], *wrap_line([Span(question, "bold")], width)]
        return lines


class ColumnDialog:
    """The columns of the table, at first those that it shows on a screen of ``width``. Each change is kept for the next
    start.
    """

    def __init__(self, table: ProcessList, width: int) -> None:
        keys = {
            **selection_keys(self._move),
            **dict.fromkeys((" ", "x", "enter"), self._change),
            "d": lambda: self._set(()),
        }
        self.panel = Panel(self._lines, ("c",), keys, self._hints)
        self.table = table
        self.automatic = [column.name for column in table.columns_in(width)]
        self.cursor, self.problem = 0, ""

    def _hints(self) -> Hints:
        return (("esc", "Close"), ("↑↓", "Column"), ("space", "Show or hide"), ("d", "Default"))

    def _move(self, step: int) -> None:
        self.cursor = max(0, min(self.cursor + step, len(COLUMNS) - 1))
        self.panel.revealed = self.cursor + 1, self.cursor + 1

    def _change(self) -> None:
        shown = {*(self.table.columns or self.automatic)} ^ {COLUMNS[self.cursor].name}
        self._set([column.name for column in COLUMNS if column.name in shown])

    def _set(self, columns: Sequence[str]) -> None:
        self.table.columns = columns
        self.problem = save_columns(columns)

    def _lines(self, width: int) -> list[StyledLine]:
        shown = self.table.columns or self.automatic
        return [
            [Span("columns of the table" if self.table.columns else "columns of the table: those with values", "bold")],
            *(
                [
                    Span(
                        f" [{'x' if column.name in shown else ' '}] {column.name} ",
                        "chosen" if at == self.cursor else "",
                    )
                ]
                for at, column in enumerate(COLUMNS)
            ),
            *wrap_line([Span(self.problem, "bold")], width),
        ]
