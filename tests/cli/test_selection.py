"""Programs selected by name or pid, sizes with a unit, and the queue of requests for memory."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gpumond.cli.arguments import add_target
from gpumond.cli.client import COMMANDS_IN_TEXTS, DEFAULT_URL, command_line, program_command, with_commands
from gpumond.commands.main import commands
from gpumond.facts.errors import ConfigError
from gpumond.facts.quota import EffectiveQuota, GrantedRequest, QueuedRequest
from gpumond.facts.suspension import MemoryHolder
from gpumond.facts.units import GIB, clock_text, parse_size_argument, rough_duration_text
from gpumond.features.alerts.command import _next_steps, _runbook
from gpumond.features.quotas.admission_client import WaitStatusLine, parse_size
from gpumond.features.quotas.command import no_request_text, queue_table, queue_text
from gpumond.view.frame import frame_view
from gpumond.view.rows import quota_sentence, requests_ahead, reserve_sentences
from gpumond.view.text import time_text
from tests.helpers.frames import fake_daemon, make_frame
from tests.helpers.running import gpumond_here
from tests.helpers.values import make_device, make_process, make_suspended


@pytest.mark.parametrize(
    ("words", "selected"),
    [
        (["training"], ("training", None)),
        (["4242"], (None, 4242)),
        (["--workload", "4242"], ("4242", None)),
        (["--pid", "7"], (None, 7)),
    ],
)
def test_program_is_selected_by_name_or_pid(words: list[str], selected: tuple[str | None, int | None]):
    parser = argparse.ArgumentParser()
    add_target(parser, "flush")
    found = parser.parse_args(words)
    assert (found.workload, found.pid) == selected


def test_two_selections_are_refused():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_target(parser, "flush")
    for words in ([], ["training", "--device", "0"]):
        with pytest.raises((SystemExit, argparse.ArgumentError)):
            parser.parse_args(words)


def test_size_without_a_unit_is_refused():
    with pytest.raises(ConfigError, match="expected a unit, as in 40GiB"):
        parse_size("40")
    with pytest.raises(ValueError, match="expected a unit"):
        parse_size_argument("1.5")
    assert [parse_size_argument(text) for text in ("40GiB", "0", "7 B")] == [40 * GIB, 0, 7]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (20, "less than 1 min"),
        (431, "about 7 min"),
        (2000, "about 35 min"),
        (9000, "about 2 h"),
        (300_000, "about 3 d"),
    ],
)
def test_time_that_is_known_roughly_is_round(seconds: float, text: str):
    assert rough_duration_text(seconds) == text


QUEUED = QueuedRequest(
    id="a",
    device_uuid="GPU-a",
    need_bytes=20 * GIB,
    available_bytes=8 * GIB,
    missing_bytes=7 * GIB,
    ahead=1,
    user="ann",
    workload="pretrain",
    pid=4242,
    since=999_940.0,
)


def test_queue_is_shown_with_what_is_missing_and_since_when():
    frame = make_frame(make_device(used_bytes=GIB), queue=(QUEUED,))
    missing = "8.0 GiB is available, flushes would release 5.0 GiB, and 7.0 GiB would still be missing"
    sentence = (
        f"pretrain (pid 4242, ann) has been waiting 1 min for 20.0 GiB on GPU 0, behind 1 other request; {missing}"
    )
    row = queue_table(frame).splitlines()[1].split("  ")
    assert [cell.strip() for cell in row if cell] == [
        "0",
        "20.0 GiB",
        "8.0 GiB",
        "5.0 GiB",
        "7.0 GiB",
        "2",
        "4242",
        "pretrain",
        "ann",
        "1 min",
    ]
    notices = [notice for notice in frame_view(frame).notices if notice.kind == "waiting"]
    assert [(notice.title, notice.text) for notice in notices] == [("waiting", sentence)]


def test_queue_names_what_is_ahead_with_its_size():
    first = replace(QUEUED, id="b", ahead=0, workload="bigjob", need_bytes=30 * GIB)
    elsewhere = replace(QUEUED, id="c", ahead=0, workload="other", device_uuid="GPU-b")
    frame = make_frame(make_device(used_bytes=GIB), make_device("GPU-b", index=1), queue=(first, elsewhere, QUEUED))
    sentence = "pretrain (pid 4242, ann) is number 2 in the queue, behind bigjob (30.0 GiB)"
    assert sentence in queue_text(frame)
    assert any("on GPU 0, behind bigjob (30.0 GiB); 8.0" in notice.text for notice in frame_view(frame).notices)


def test_queue_states_room_that_earlier_requests_claim():
    first = replace(QUEUED, id="b", ahead=0, workload="bigjob", need_bytes=30 * GIB, available_bytes=8 * GIB)
    behind = replace(QUEUED, available_bytes=-22 * GIB, claimed_bytes=30 * GIB, missing_bytes=42 * GIB)
    text = queue_text(make_frame(make_device(used_bytes=GIB), queue=(first, behind)))
    assert "number 2 in the queue, behind bigjob (30.0 GiB); the available 8.0 GiB is kept for earlier requests" in text
    assert "42.0 GiB" not in text


def test_waiting_memory_is_a_part_of_the_free_memory_that_nobody_else_is_promised():
    device = make_device(used_bytes=GIB, free_bytes=12 * GIB, processes=(make_process(10, GIB),))
    frame = make_frame(device, queue=(QUEUED,))
    assert [each.waiting_bytes for each in frame_view(frame).devices] == [12 * GIB]
    quota = {"reserve_bytes": 5 * GIB, "reserve_quota": "gold"}
    frame["processes"][0]["quota"] = quota
    assert [each.waiting_bytes for each in frame_view(frame).devices] == [8 * GIB]
    grant = {"id": "b", "device_uuid": "GPU-a", "pid": 7, "user": "", "workload": "eval"}
    frame["grants"] = [grant | {"need_bytes": 3 * GIB, "unused_bytes": 3 * GIB}]
    assert [each.waiting_bytes for each in frame_view(frame).devices] == [5 * GIB]
    frame["snapshot"]["quotas"] = [{"pid": 7, "quota": quota}]
    assert [each.waiting_bytes for each in frame_view(frame).devices] == [7 * GIB], (
        "a grant is a part of the quota's reserve"
    )


@pytest.mark.parametrize(
    ("ahead", "names", "text"),
    [
        (1, ["a"], "behind a (1.0 GiB)"),
        (2, ["a", ""], "behind a (1.0 GiB) and pid 7 (1.0 GiB)"),
        (5, ["a", "b", "c"], "behind a (1.0 GiB), b (1.0 GiB), c (1.0 GiB) and 2 more"),
        (2, [], "behind 2 other requests"),
    ],
)
def test_requests_ahead_are_named_and_the_rest_is_counted(ahead: int, names: list[str], text: str):
    assert requests_ahead(ahead, [{"workload": name, "pid": 7, "need_bytes": GIB} for name in names]) == text


def test_what_a_quota_reserves_is_named_where_a_program_waits():
    device = make_device(used_bytes=GIB, processes=(make_process(10, GIB),))
    frame = make_frame(device, queue=(QUEUED,))
    assert list(reserve_sentences(frame)) == []
    frame["processes"][0]["quota"] = {"reserve_bytes": 5 * GIB, "reserve_quota": "gold"}
    sentence = (
        "pretrain (pid 4242, ann) is waiting for 20.0 GiB on GPU 0, where the quota gold reserves 4.0 GiB that its "
        "programs aren't using"
    )
    assert list(reserve_sentences(frame)) == [sentence]
    assert sentence in queue_text(frame)


def test_grant_is_shown_until_its_memory_is_used():
    grant = GrantedRequest(
        id="b",
        device_uuid="GPU-a",
        need_bytes=20 * GIB,
        unused_bytes=20 * GIB,
        user="ann",
        workload="pretrain",
        pid=4242,
    )
    partly = replace(grant, unused_bytes=15 * GIB, workload="", user=None)
    frame = make_frame(make_device(used_bytes=GIB), grants=(grant, partly))
    sentences = [
        "20.0 GiB of GPU 0 is granted to pretrain (pid 4242, ann), which isn't using it yet",
        "20.0 GiB of GPU 0 is granted to pid 4242, which uses 5.0 GiB of it so far",
    ]
    assert [notice.text for notice in frame_view(frame).notices if notice.kind == "granted"] == sentences
    assert queue_text(frame) == "\n".join((f"{no_request_text(frame)}\n", *sentences))


def test_the_advice_to_wait_names_a_device_if_there_are_several():
    one, two = make_device(), make_device("GPU-b", index=1)
    assert "run --need SIZE --wait 10m --" in queue_text(make_frame(one))
    assert "run --need SIZE --need-device GPU --wait 10m --" in queue_text(make_frame(one, two))


def test_a_wait_names_another_device_that_has_room():
    free = make_device("GPU-b", index=1, used_bytes=50 * GIB, free_bytes=30 * GIB)
    full = replace(free, used_bytes=70 * GIB, free_bytes=10 * GIB)
    for other, named in ((free, True), (full, False)):
        (notice,) = [
            notice
            for notice in frame_view(make_frame(make_device(used_bytes=GIB), other, queue=(QUEUED,))).notices
            if notice.kind == "waiting"
        ]
        end = "; GPU 1 has 30.0 GiB available: to use it, start pretrain (pid 4242, ann) with --need-device 1"
        assert notice.text.endswith(end) is named


def test_waiting_is_one_line_in_a_log_until_something_changes(capsys: pytest.CaptureFixture[str]):
    answer = {"state": "waiting", "need_bytes": 20 * GIB, "device_index": 0, "available_bytes": 3 * GIB, "ahead": 0}
    answer |= {"missing_bytes": 17 * GIB, "plan": ()}
    line = WaitStatusLine()
    for at in range(29):
        line.show(answer | {"available_bytes": 3 * GIB + at}, float(at))
    line.show(answer | {"available_bytes": 5 * GIB}, 29.0)
    line.end()
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_holders_of_the_memory_are_named_where_a_program_waits():
    held = (MemoryHolder(7, "embeddings", 9 * GIB), MemoryHolder(8, "finetune", GIB))
    frame = make_frame(make_device(used_bytes=GIB), queue=(replace(QUEUED, holders=held),))
    names = "largest programs are embeddings (pid 7, 9.0 GiB) and finetune (pid 8, 1.0 GiB)"
    (notice,) = [notice for notice in frame_view(frame).notices if notice.kind == "waiting"]
    assert notice.text.endswith(f"; GPU 0's {names}")
    assert f"pretrain (pid 4242, ann) is waiting; GPU 0's {names}" in queue_text(frame)


def test_granted_memory_that_another_program_uses_is_stated_and_not_a_negative_number():
    short = replace(QUEUED, available_bytes=-3 * GIB // 2, missing_bytes=43 * GIB // 2, ahead=0)
    text = queue_text(make_frame(make_device(used_bytes=GIB), queue=(short,)))
    assert "-1.5" not in text
    assert "programs on GPU 0 use 1.5 GiB that is granted to or reserved for other programs" in text
    assert "other programs" not in queue_text(make_frame(make_device(), queue=(replace(short, ahead=1),)))


def test_device_with_room_is_named_unless_it_is_granted_or_divided():
    full, other = (
        make_device(used_bytes=79 * GIB),
        make_device(uuid="GPU-b", index=1, used_bytes=10 * GIB, free_bytes=70 * GIB),
    )
    text = "GPU 1 has 70.0 GiB available: to use it, start pretrain (pid 4242, ann) with --need-device 1"
    assert text in queue_text(make_frame(full, other, queue=(QUEUED,)))
    part = make_device(uuid="MIG-b", index=2, parent_uuid="GPU-b", used_bytes=79 * GIB)
    assert "--need-device" not in queue_text(make_frame(full, other, part, queue=(QUEUED,)))
    granted = GrantedRequest(
        id="b", device_uuid="GPU-b", need_bytes=60 * GIB, unused_bytes=60 * GIB, user="bob", workload="eval", pid=8
    )
    assert "--need-device" not in queue_text(make_frame(full, other, queue=(QUEUED,), grants=(granted,)))


def test_suspended_program_that_waits_is_not_to_be_started_again():
    full, other = (
        make_device(used_bytes=79 * GIB),
        make_device(uuid="GPU-b", index=1, used_bytes=10 * GIB, free_bytes=70 * GIB),
    )
    suspended = (make_suspended(4242, 20 * GIB),)
    frame = make_frame(full, other, queue=(QUEUED,), suspended_programs=suspended)
    (notice,) = [notice for notice in frame_view(frame).notices if notice.kind == "waiting"]
    for text in (queue_text(frame), notice.text):
        assert "--need-device" not in text
        assert (
            "pretrain (pid 4242, ann) will be resumed as soon as it fits; to make room, flush, suspend or stop" in text
        )


def test_request_whose_turn_is_later_states_no_missing_memory():
    later = replace(QUEUED, available_bytes=-10 * GIB, missing_bytes=30 * GIB)
    content = frame_view(make_frame(make_device(used_bytes=GIB), queue=(later,)))
    assert [notice.text for notice in content.notices if notice.kind == "waiting"] == [
        "pretrain (pid 4242, ann) has been waiting 1 min for 20.0 GiB on GPU 0, behind 1 other request"
    ]


def test_commands_in_a_text_rely_on_the_variables_of_the_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = "move it: gpumond suspend --pid 7; gpumond suspended it before"
    monkeypatch.delenv("GPUMOND_URL", raising=False)
    monkeypatch.setenv("GPUMOND_RUNTIME_DIR", str(tmp_path))
    assert with_commands(text, DEFAULT_URL) == text
    given = "GPUMOND_URL=http://node:1 gpumond"
    assert with_commands(text, "http://node:1/") == f"move it: {given} suspend --pid 7; gpumond suspended it before"
    monkeypatch.setenv("GPUMOND_URL", "node:1")
    assert with_commands(text, "http://node:1/") == text
    assert with_commands("gpumond queue", DEFAULT_URL) == f"GPUMOND_URL={DEFAULT_URL} gpumond queue"


def test_commands_for_another_shell_name_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GPUMOND_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("GPUMOND_URL", raising=False)
    assert command_line("queue", "http://127.0.0.1:1") == f"GPUMOND_RUNTIME_DIR={tmp_path} gpumond queue"
    monkeypatch.setenv("GPUMOND_URL", "http://node:1")
    given = f"GPUMOND_RUNTIME_DIR={tmp_path} GPUMOND_URL=http://127.0.0.1:1"
    assert command_line("queue", "http://127.0.0.1:1") == f"{given} gpumond queue"
    monkeypatch.delenv("GPUMOND_RUNTIME_DIR")
    monkeypatch.delenv("GPUMOND_SOCKET", raising=False)
    assert command_line("queue", "http://127.0.0.1:1") == "GPUMOND_URL=http://127.0.0.1:1 gpumond queue"


def test_commands_are_named_as_the_shell_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = tmp_path / "gpumond"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [f"{script}-python", "demo"])
    assert program_command() == str(script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_command() == "gpumond"
    monkeypatch.setattr(sys, "argv", ["/lib/gpumond/__main__.py"])
    assert program_command() == f"{sys.executable} -m gpumond"


def test_runbook_without_an_address_is_in_the_web_ui():
    assert _runbook("http://node:1", "leak") == "runbook for leak: http://node:1/docs/runbooks/leak"
    assert _runbook("", "leak") == "runbook for leak: /docs/runbooks/leak in the web UI"


def test_next_steps_that_differ_name_their_programs():
    one, other, device = (
        {"rule": "full", "labels": labels, "annotations": {"description": text}}
        for labels, text in (
            ({"workload": "train", "pid": "7", "gpu": "0"}, "raise its limit"),
            ({"pid": "8", "gpu": "1"}, "free memory on the GPU"),
            ({"gpu": "2"}, "raise its limit"),
        )
    )
    found = [*_next_steps([one, other, device], "http://node:1")]
    assert found == ["", "full of train, GPU 2: raise its limit", "full of pid 8: free memory on the GPU"]
    assert [*_next_steps([one, device], "http://node:1")] == ["", "full: raise its limit"]


def limit_of(size: int, uuid: str = "GPU-a") -> dict[str, object]:
    return {"device_uuid": uuid, "limit_bytes": size * GIB}


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        ({"allows_limit": True, "limits": []}, "limit 8.0 GiB (chat; not in effect: no allocator has applied it)"),
        ({"allows_limit": False, "limits": [limit_of(8)]}, "limit 8.0 GiB (chat)"),
        ({"allows_limit": False, "limits": [limit_of(8), limit_of(2, "GPU-b")]}, "limit 8.0 GiB (chat)"),
        (
            {"allows_limit": True, "limits": [limit_of(2)]},
            "limit 2.0 GiB (set with gpumond limit or by the program; the limit of the chat quota is 8.0 GiB)",
        ),
        (
            {"allows_limit": False, "limits": []},
            "limit 8.0 GiB (chat; not in effect: the program doesn't allow limits)",
        ),
        (None, "limit 8.0 GiB (chat; not in effect: the program has no agent)"),
    ],
)
def test_limit_of_a_quota_is_shown_as_far_as_it_is_in_effect(report: dict[str, object] | None, shown: str):
    quota = asdict(EffectiveQuota(limit_bytes=8 * GIB, limit_quota="chat"))
    assert quota_sentence({"device_uuid": "GPU-a", "quota": quota}, report) == shown


def test_quota_states_by_how_much_its_soft_limit_is_exceeded():
    quota = asdict(EffectiveQuota(soft_limit_bytes=8 * GIB, soft_limit_quota="a"))
    rows = [{"device_uuid": "GPU-a", "quota": quota, "used_bytes": used} for used in (9 * GIB, 8 * GIB, None)]
    plain = "soft limit 8.0 GiB (a)"
    assert [quota_sentence(row, None) for row in rows] == ["soft limit 8.0 GiB (a; exceeded by 1.0 GiB)", plain, plain]


def test_times_are_those_of_the_summaries_in_each_time_zone(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        assert time_text(1e6) == f"1970-01-12 {clock_text(1e6).replace(' UTC', 'Z')}"
    time.tzset()


def test_commands_of_texts_are_commands():
    assert set(COMMANDS_IN_TEXTS.split()) <= commands().keys()


def test_queue_as_json_has_what_flushes_would_return():
    short = replace(QUEUED, need_bytes=20 * GIB, available_bytes=12 * GIB, missing_bytes=3 * GIB)
    with fake_daemon(make_frame(make_device(), queue=(short, replace(short, available_bytes=None)))) as fake:
        done = gpumond_here("queue", "--json", "--url", fake.url)
    first, second = json.loads(done.stdout)["queue"]
    assert (first["by_flushes_bytes"], second["by_flushes_bytes"]) == (5 * GIB, None)
    assert (first["need_bytes"], first["missing_bytes"]) == (20 * GIB, 3 * GIB)
