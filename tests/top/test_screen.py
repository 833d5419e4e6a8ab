"""Heights of the parts of the screen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from gpumond.top.processes import ProcessList
from gpumond.top.screen import (
    HELP,
    HINTS,
    MIN_TABLE,
    Screen,
    chart_rows,
    device_at,
    estimate_line,
    first_line_shown,
    heights,
    help_lines,
    hint_line,
    notice_lines,
    notices_in_full,
)
from gpumond.view.frame import frame_view
from gpumond.view.notices import FrameNotice
from gpumond.view.text import (
    Span,
    StyledLine,
    ansi,
    clip_line,
    colors_of,
    cut,
    display_width,
    pad,
    plain_text,
    table as whole_table,
    table_lines as table,
    width_of,
    wrap_line,
)
from tests.helpers.frames import busy_frame

PARTS = ("devices", "estimate", "filter", "chart", "notices")


@given(st.fixed_dictionaries({part: st.integers(0, 20) for part in PARTS}), st.integers(3, 80))
def test_parts_fill_the_screen_and_the_table_keeps_its_rows(wanted: dict[str, int], rows: int):
    found = heights(rows, wanted)
    assert all(0 <= found[part] <= wanted[part] for part in PARTS)
    if rows >= 3 + wanted["filter"] + 1 + MIN_TABLE:
        assert sum(found.values()) == rows
        assert found["table"] >= MIN_TABLE
    assert found["chart"] >= 2 or found["chart"] in (0, wanted["chart"])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"devices": 4, "estimate": 1, "filter": 0, "chart": 3, "notices": 6}, (4, 1, 3, 6, 8)),
        ({"devices": 10, "estimate": 1, "filter": 0, "chart": 3, "notices": 6}, (10, 1, 2, 3, 6)),
        ({"devices": 10, "estimate": 1, "filter": 1, "chart": 3, "notices": 6}, (10, 1, 0, 3, 7)),
    ],
    ids=["one device", "eight devices", "eight devices and a filter"],
)
def test_parts_of_a_screen_of_24_rows(wanted: dict[str, int], expected: tuple[int, ...]):
    found = heights(22, wanted)
    assert tuple(found[part] for part in ("devices", "estimate", "chart", "notices", "table")) == expected


def test_rows_of_the_table_precede_chart_and_notices():
    wanted = {"devices": 7, "estimate": 1, "filter": 0, "chart": 3, "notices": 5}
    assert heights(22, wanted, 5)["table"] == 6
    assert heights(22, wanted, 7) == {**wanted, "notices": 4, "table": 7}
    assert heights(22, wanted, 50)["table"] == 8, "not all of the screen"


@pytest.mark.parametrize(("rows", "free", "expected"), [(24, 12, 2), (60, 0, 9), (60, 20, 20), (60, 50, 30)])
def test_chart_takes_free_rows_of_a_large_screen(rows: int, free: int, expected: int):
    assert chart_rows(rows, free) == expected


@pytest.mark.parametrize("problems", range(9))
def test_chart_is_drawn_for_the_rows_that_it_has(problems: int):
    """A part of a higher chart would show only what exceeds the rest of it."""
    shown = frame_view(busy_frame())
    table = ProcessList()
    table.fill(shown.processes, {})
    notices = [FrameNotice("bad", f"problem {number}", "", f"kind {number}") for number in range(problems)]

    def chart_lines(_width: int, rows: int) -> list[StyledLine]:
        return [[Span(f"chart of {rows} rows")], *[[Span("row of the chart")]] * rows]

    for height in range(10, 40):
        lines = Screen(True).lines(shown, notices, table, None, False, chart_lines, 80, height)
        text = [plain_text(line) for line in lines]
        drawn = [line for line in text if line.startswith("chart of")]
        assert drawn in ([], [f"chart of {text.count('row of the chart')} rows"])


@pytest.mark.parametrize("width", [40, 80, 120])
def test_help_is_complete_at_any_width(width: int):
    lines = help_lines(width - 2)
    assert max(map(width_of, lines)) <= width - 2
    words = " ".join(map(plain_text, lines)).split()
    assert {word for word in HELP.split() if word != "|"} <= {*words}


def test_way_to_quit_is_shown_at_any_width():
    for width in (20, 40, 80, 200):
        assert plain_text(hint_line(HINTS, width)).startswith("? Help q Quit")


@pytest.mark.parametrize(
    ("width", "expected"),
    [(80, "a flush of all programs would release about 12.0 GiB"), (40, "a flush would release about 12.0 GiB")],
)
def test_flush_estimate_keeps_its_amount(width: int, expected: str):
    (line,) = estimate_line(frame_view(busy_frame()), width)
    assert plain_text(line) == expected


def test_selected_device_is_scrolled_into_view():
    lines = [[Span(f"GPU {at}", "chosen" if at == 7 else "bold")] for at in range(10)]
    assert first_line_shown(lines, 4, 0, "GPU-7") == 4
    assert first_line_shown(lines, 4, 9, "GPU-7") == 6
    assert first_line_shown(lines, 20, 5, "GPU-7") == 0


def test_line_belongs_to_the_device_above():
    lines = [[Span("GPU 0", "bold")], [Span("####")], [Span("# live")], [Span("GPU 1", "chosen")], [Span("##")]]
    assert [device_at(lines, place) for place in range(5)] == [0, 0, 0, 1, 1]


LEAK = FrameNotice(
    "warn",
    "leak firing for 1 min 20 s",
    "notebook (pid 4194304) is leaking about 840 MiB/min on GPU 0 (since 14:05:44 UTC), which will be full in about "
    "10 min at this rate; retained by `losses` in `leak` at /data/programs.py:125 (20 tensors added in 20 s)",
    "alert leak",
    "find out what retains the memory: gpumond why --pid 4194304; restart the program before the GPU is full",
    program="notebook (pid 4194304)",
    gpu="GPU 0",
    full_in=600.0,
)
OOM = FrameNotice(
    "bad",
    "out-of-memory firing for 31 s",
    "finetune (pid 9282) on GPU 1 ran out of memory in `finetune` at /data/programs.py:97 (1x in the last 10 minutes)",
    "alert out-of-memory",
    "to see why: gpumond oom show --pid 9282",
    program="finetune (pid 9282)",
    gpu="GPU 1",
)
IDLE = FrameNotice(
    "note",
    "idle-holder firing for 49 s",
    "embeddings (pid 7) uses 8.9 GiB on GPU 1 and has been idle for 2 min 49 s",
    "alert idle-holder",
    "to release 8.9 GiB: gpumond suspend --pid 7; if you don't need the program, stop it",
    program="embeddings (pid 7)",
    gpu="GPU 1",
)
FRAGMENTED = FrameNotice(
    "warn",
    "fragmentation firing for 2 min",
    "etl (pid 8) on GPU 0: 57% of its torch pool (not counting cached memory) was fragmented even at peak use (0 B "
    "stranded)",
    "alert fragmentation",
    "set PYTORCH_ALLOC_CONF=expandable_segments:True (PyTorch), then restart the program",
    program="etl (pid 8)",
    gpu="GPU 0",
)
OVER = replace(FRAGMENTED, text=f"ended at 07:00:00 UTC; the alert was: {FRAGMENTED.text}", advice="")
QUOTA = FrameNotice(
    "warn",
    "quota-exceeded firing",
    "chat (pid 6) on GPU 0 uses 3.1 GiB, 391.2 MiB more than the soft limit of the chat quota (2.7 GiB)",
    "alert quota-exceeded",
    "to release 392.0 MiB: gpumond flush --pid 6",
    program="chat (pid 6)",
    gpu="GPU 0",
)
OWN_RULE = FrameNotice("warn", "busy firing", "it is too busy", "alert busy", program="etl (pid 8)", gpu="GPU 0")
ORPHAN = FrameNotice("warn", "pid 9 (train) has lost its parent and uses 2.0 GiB", "", "orphaned", "look at it; kill 9")


@pytest.mark.parametrize(
    ("notice", "width", "expected"),
    [
        (LEAK, 80, "notebook on GPU 0 is leaking about 840 MiB/min; full in about 10 min"),
        (LEAK, 62, "notebook on GPU 0 is leaking about…; full in about 10 min"),
        (LEAK, 40, "notebook on GPU 0: full in about 10 min"),
        (OOM, 80, "finetune on GPU 1 ran out of memory in…; gpumond oom show --pid 9282"),
        (OOM, 40, "finetune on GPU 1 ran out of memory in…"),
        (
            OOM,
            110,
            "finetune on GPU 1 ran out of memory in `finetune` at programs.py:97; to see why: gpumond oom "
            "show --pid 9282",
        ),
        (IDLE, 100, "embeddings on GPU 1 uses 8.9 GiB and has been idle for 2 min 49 s; gpumond suspend --pid 7"),
        (FRAGMENTED, 80, "etl on GPU 0: 57% of its torch pool was fragmented even at peak use"),
        (FRAGMENTED, 40, "etl on GPU 0: 57% of its torch pool was…"),
        (OVER, 40, "etl on GPU 0: fragmentation ended at…"),
        (OVER, 80, "etl (pid 8) on GPU 0: fragmentation ended at 07:00:00 UTC"),
        (QUOTA, 60, "chat on GPU 0 uses 3.1 GiB…; gpumond flush --pid 6"),
        (OWN_RULE, 80, "etl (pid 8) on GPU 0: it is too busy"),
        (ORPHAN, 80, "pid 9 (train) has lost its parent and uses 2.0 GiB: look at it; kill 9"),
    ],
)
def test_notice_begins_with_its_subject_and_keeps_its_command(notice: FrameNotice, width: int, expected: str):
    (line,) = notice_lines([notice], width, 1)
    assert plain_text(line) == expected


def test_worst_notice_is_shown_and_the_others_are_counted():
    later = replace(LEAK, full_in=9000.0, program="later (pid 5)", text="later (pid 5) is leaking slowly on GPU 0")
    every = [IDLE, FRAGMENTED, later, LEAK, OOM]
    (line,) = notice_lines(every, 80, 1)
    assert plain_text(line) == "finetune on GPU 1 ran out of…; gpumond oom show --pid 9282  4 more: press a"
    lines = [plain_text(line) for line in notice_lines(every, 80, 3)]
    assert [line.split(" on ")[0] for line in lines] == ["finetune", "notebook", "etl"]
    assert lines[1].endswith("  leak: 1 more"), "the one whose GPU is full soonest is shown"
    assert lines[2].endswith("  1 more: press a")
    (line,) = notice_lines([LEAK, later, FRAGMENTED], 40, 1)
    assert plain_text(line) == "notebook on GPU 0 is…  2 more: press a"
    lines = [plain_text(line) for line in notice_lines(every, 80, 5)]
    assert [line.split(" on ")[0] for line in lines] == ["finetune", "notebook", "later", "etl", "embeddings"]


def test_all_notices_have_the_order_of_the_lines():
    every = [IDLE, FRAGMENTED, LEAK, OOM]
    full = [plain_text(line) for line in notices_in_full(every, 80)]
    kinds = [line.split()[0] for before, line in zip(["", *full], full, strict=False) if line and not before]
    assert kinds == ["out-of-memory", "leak", "fragmentation", "idle-holder"]


def test_lines_that_are_left_continue_the_worst_notice():
    *first, last = notice_lines([FRAGMENTED, OOM], 80, 4)
    assert len(first) == 3
    assert " ".join(map(plain_text, first)).endswith("to see why: gpumond oom show --pid 9282")
    assert plain_text(last) == "etl on GPU 0: 57% of its torch pool was fragmented even at peak use"


@given(st.integers(60, 400), st.sampled_from([LEAK, OOM]))
def test_notice_is_cut_between_words(width: int, notice: FrameNotice):
    (line,) = notice_lines([notice], width, 1)
    text = plain_text(line)
    assert display_width(text) <= width
    words = f"{notice.text} {notice.advice} programs.py:97 programs.py:125".split()
    assert {word.strip("…;:,") for word in text.split()} <= {word.strip("…;:,") for word in words}


def test_notices_of_one_kind_take_one_line_and_are_complete_in_full():
    leaks = [FrameNotice("warn", "leak", f"pid {at} grows", "leak") for at in range(3)]
    other = FrameNotice("bad", "the daemon doesn't respond", "no response")
    lines = [plain_text(line) for line in notice_lines([other, *leaks], 80, 3)]
    assert lines == ["the daemon doesn't respond: no response", "leak: pid 0 grows  leak: 2 more"]
    lines = [plain_text(line) for line in notice_lines([other, *leaks], 80, 1)]
    assert lines == ["the daemon doesn't respond: no response  3 more: press a"]
    full = [plain_text(line) for line in notices_in_full([other, *leaks], 80)]
    assert [line for line in full if line] == [
        "the daemon doesn't respond: no response",
        *(f"leak: pid {at} grows" for at in range(3)),
    ]


LINES = st.lists(st.builds(Span, st.text(st.sampled_from("ab 漢…é"), max_size=12)), max_size=5)


@given(LINES, st.integers(1, 40))
def test_clipped_line_is_at_most_as_long_as_the_width(line: list[Span], width: int):
    short = clip_line(line, width)
    assert width_of(short) <= width
    if width_of(line) <= width:
        assert short == line
    else:
        assert plain_text(short).endswith("…")


@given(LINES, st.integers(2, 40))
def test_wrapped_lines_contain_all_words(line: list[Span], width: int):
    lines = wrap_line(line, width)
    assert all(width_of(each) <= 2 * width for each in lines)  # a cell of a cut word may be wide
    text = "".join(piece.text for each in lines for piece in each)
    assert text.replace(" ", "") == "".join(piece.text for piece in line).replace(" ", "")


@given(st.lists(st.text("ab,", min_size=1, max_size=5), max_size=9), st.integers(5, 20))
def test_wrapped_lines_fit_without_a_space_at_the_end(words: list[str], width: int):
    lines = wrap_line([Span(" ".join(words))], width)
    assert all(width_of(each) <= width for each in lines)


@given(st.text(st.sampled_from("ab漢é…"), max_size=12), st.integers(2, 20), st.booleans())
def test_fitted_text_has_the_width(text: str, width: int, right: bool):
    assert display_width(pad(text, width, right)) == width


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("漢字", 4, "漢字"), ("漢字x", 4, "漢…"), ("e\u0301", 1, "e\u0301")],
)
def test_cut_counts_columns(text: str, width: int, expected: str):
    assert cut(text, width) == expected


def test_styles_and_colors_of_a_line():
    line = [
        Span("a"),
        Span("b", "bold"),
        Span("c", background="live"),
        Span("d", background="live", foreground="cached"),
    ]
    assert ansi(line, "none") == "a\x1b[1mb\x1b[0mcd"
    assert ansi(line, "true").endswith("\x1b[48;2;51;81;253mc\x1b[0m\x1b[48;2;51;81;253;38;2;45;165;149md\x1b[0m")
    assert "48;5;" in ansi(line, "256")


@pytest.mark.parametrize(
    ("environ", "colors"),
    [
        ({"TERM": "xterm-256color"}, "256"),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "true"),
        ({"TERM": "xterm", "COLORTERM": "24bit"}, "true"),
        ({"TERM": "xterm"}, "none"),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": "1"}, "none"),
        ({}, "none"),
    ],
)
def test_environment_states_the_colors(environ: dict[str, str], colors: str):
    assert colors_of(environ) == colors


def test_table_shortens_text_and_keeps_numbers():
    header, rows = (">PID", "PROGRAM", ">USED", "VERDICT"), [("123456", "x" * 40, "10.0 GiB", "fragmentation")]
    assert max(map(len, table(header, rows))) == 6 + 40 + 8 + 13 + 6
    narrow = table(header, rows, 50)
    assert max(map(len, narrow)) == 50
    assert "123456" in narrow[1]
    assert "10.0 GiB" in narrow[1]
    assert "…" in narrow[1]
    least = table(header, rows, 10)
    assert max(map(len, least)) == 6 + 12 + 8 + 12 + 6


def test_last_column_of_a_wide_table_is_broken_between_words():
    rows = [["1", "some words that are too long"], ["22", "short"]]
    assert whole_table((">PID", "TEXT"), rows, 36) == "PID  TEXT\n  1  some words that are too long\n 22  short"
    long = [["1", "a summary of more words than the terminal has columns"], ["22", "short"]]
    assert whole_table((">PID", "SUMMARY"), long, 46).splitlines() == [
        "PID  SUMMARY",
        "  1  a summary of more words than the terminal",
        "     has columns",
        " 22  short",
    ]
    assert whole_table((">PID", "SUMMARY"), long, 30).splitlines() == [
        "PID  SUMMARY",
        "  1",
        "    a summary of more words",
        "    than the terminal has",
        "    columns",
        " 22  short",
    ]
