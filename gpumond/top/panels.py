"""Panels of text in front of the table: help, notices and details."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpumond.facts.units import duration, human
from gpumond.top.local import SIGNALS, refusal, send
from gpumond.view.lines import Line, Piece, wrapped
from gpumond.view.rows import ProcessRow

Hints = Sequence[tuple[str, str]]
"""Keys and their effects."""


class Panel:
    """A panel of text that scrolls. ``first``: the first line that is shown."""

    closing: Sequence[str] = ("escape", "q")

    def __init__(self) -> None:
        self.first = 0

    @property
    def hints(self) -> Hints:
        return (("esc", "Close"), ("↑↓", "Scroll"))

    def lines(self, width: int) -> list[Line]:
        raise NotImplementedError

    def press(self, key: str) -> None:
        """Handle a key that neither closes nor scrolls the panel."""

    def scroll(self, lines: int) -> None:
        """Move the text. The screen limits ``first`` to the lines that exist."""
        self.first = max(0, self.first + lines)


HELP: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    (
        "Rows",
        (
            ("↑ ↓ PgUp PgDn Home End", "move the cursor"),
            ("Enter, d", "details of a process; open or close a group"),
            ("Space", "mark or unmark a process or a group"),
            ("U", "unmark all"),
            ("/, F3, F4", "filter: parts of a name, pid, user, verdict, container or pod"),
            ("Esc", "remove filter, selection of a device and marks"),
        ),
    ),
    (
        "Order",
        (
            ("s, >  and  <", "sort by the next and previous column"),
            ("r, I", "reverse the order"),
            ("g", "group by user, workload, container, or not"),
            ("t, F5", "tree of parents and children (processes of this machine)"),
        ),
    ),
    (
        "Devices",
        (
            ("← →, 0 to 9", "show one device"),
            ("", "The chart shows the selected device, else the process under the cursor."),
        ),
    ),
    (
        "Actions, each with a confirmation",
        (
            ("f", "flush the marked processes, else the one under the cursor"),
            ("F", "flush the selected device, else all programs with an agent"),
            ("k, F9", "send a signal to your own programs: the marked ones, else the one under the cursor"),
        ),
    ),
    (
        "Other",
        (
            ("a", "alerts, verdicts and problems in full"),
            ("p", "pause"),
            ("mouse", "click a column to sort, a device or a row to select it; scroll with the wheel"),
            ("?, h, F1", "this help"),
            ("q, F10, Ctrl-C", "quit"),
        ),
    ),
)
SHARES = (
    ("live", "holds tensors or arrays in use"),
    ("cached", "an allocator keeps it for reuse; a flush releases it"),
    ("stranded", "an allocator keeps it in partly used segments; a flush cannot release it"),
    ("overhead", "context, libraries, NCCL, imported memory, caches without an adapter"),
    ("opaque", "parts unknown: no agent, or a pool without a count"),
    ("unattributed", "used memory that no process accounts for; it may be managed memory"),
)
KEY = 24


class HelpPanel(Panel):
    closing = ("escape", "q", "?", "h", "f1")

    def lines(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for title, keys in (*HELP, ("Shares", SHARES)):
            lines += [[]] if lines else []
            lines.append([Piece(title, "bold")])
            for key, effect in keys:
                first, *rest = wrapped([Piece(effect)], max(KEY, width - KEY - 2))
                lines.append([Piece(f"  {key:<{KEY}}", "bold"), *first])
                lines += [[Piece(" " * (KEY + 2)), *line] for line in rest]
        return lines


class TextPanel(Panel):
    """Text that ``content`` returns for a width, with further keys."""

    def __init__(
        self, content: Callable[[int], list[Line]], closing: Sequence[str], keys: Mapping[str, Callable[[], None]] = {}
    ) -> None:
        super().__init__()
        self.content, self.keys = content, keys
        self.closing = ("escape", "q", *closing)

    def lines(self, width: int) -> list[Line]:
        return self.content(width)

    def press(self, key: str) -> None:
        if key in self.keys:
            self.keys[key]()


WITHOUT_AGENT = (
    "this program runs without the agent; start it with gpumond run -- COMMAND to see its shares and flush it"
)
TERM = 11


def described(row: ProcessRow, history: Sequence[Line], width: int) -> list[Line]:
    """Return the lines of the details. ``history``: the lines of its chart, if any."""
    lines: list[Line] = [[Piece(f"{row.program} (pid {row.pid}) on GPU {row.gpu}", "bold")], *history]
    for sentence in row.verdicts:
        lines += wrapped([Piece(sentence, "bold" if row.notable else "")], width)
    shares = [("used", row.used_bytes), *row.shares.items(), ("unmapped", row.unmapped_bytes)]
    holder, kv_cache = row.kv_cache or ("", "")
    more = {holder: f", {kv_cache}"} if kv_cache else {}
    if row.overhead_parts:
        more["overhead"] = f"{more.get('overhead', '')}: {row.overhead_parts}"
    terms = [(share, human(size) + more.get(share, "")) for share, size in shares if size is not None]
    terms += [("user", row.user)] if row.user else []
    if row.host:
        cpu = "" if row.host.cpu_ratio is None else f", {row.host.cpu_ratio:.0%} of a core"
        terms.append(("runs", f"{row.host.command} (for {duration(row.host.age_seconds)}{cpu})"))
        terms.append(("host memory", human(row.host.resident_bytes)))
    for term, value in (*terms, *row.facts):
        lines += wrapped([Piece(f"{term:>{TERM}} ", "dim"), Piece(value)], width)
    if row.flush_policy is None:
        lines += wrapped([Piece(WITHOUT_AGENT)], width)
    return lines


class SignalPanel(Panel):
    """The panel. ``rows``: processes, and whether their daemon may be on this machine. ``y`` sends the signal."""

    closing = ("escape", "q", "n")

    def __init__(self, rows: Sequence[tuple[ProcessRow, bool]]) -> None:
        super().__init__()
        self.rows = rows
        self.signal = 0
        self.results = [refusal(row, local) for row, local in rows]
        self.ready = not all(self.results)

    @property
    def hints(self) -> Hints:
        return (("←→", "Signal"), ("y", "Yes, send"), ("esc", "No")) if self.ready else super().hints

    def press(self, key: str) -> None:
        if not self.ready:
            return
        if key in ("left", "right"):
            self.signal = (self.signal + (1 if key == "right" else -1)) % len(SIGNALS)
        elif key == "y":
            self.ready = False
            self.results = [send(row, local, SIGNALS[self.signal]) for row, local in self.rows]

    def lines(self, width: int) -> list[Line]:
        lines: list[Line] = []
        if self.ready:
            names = [Piece(f" {name} ", "chosen" if at == self.signal else "") for at, name in enumerate(SIGNALS)]
            lines += [names, []]
        for (row, _), result in zip(self.rows, self.results, strict=True):
            text = f": {'no signal: ' if self.ready else ''}{result}" if result else ""
            lines += wrapped([Piece(f"{row.program} (pid {row.pid})", "bold"), Piece(text)], width)
        if self.ready:
            count = self.results.count("")
            programs = "1 program" if count == 1 else f"{count} programs"
            lines += [[], [Piece(f"Send {SIGNALS[self.signal]} to {programs}? y: yes  esc: no", "bold")]]
        return lines
