"""``gpumond audit``: the sentence about an entry."""

from __future__ import annotations

import pytest

from gpumond.view.audit import MAX_DETAIL_LENGTH, audit_sentence, detail_text

SILENCE = {"matchers": [{"name": "rule", "operator": "=", "value": "leak"}], "ends_at": 0.0, "reason": "known"}


@pytest.mark.parametrize(
    ("action", "detail", "text"),
    [
        (
            "flush.request",
            {"target": "workload train", "steps": ["gc", "cache"], "force": True},
            "requested a flush of workload train with the steps gc and cache, despite the cooldown",
        ),
        (
            "flush.request",
            {"target": "workload chat", "steps": ["engine"], "wake": True, "operation": "o-1", "by": "ada@ops",
             "reason": "OPS-7"},
            "requested a wake-up of workload chat with the step engine (operation o-1 by ada@ops: OPS-7)",
        ),
        (
            "flush.receipts",
            {"pids": [7, 8], "released_bytes": 3 << 30, "outcomes": {"freed": 2}},
            "flushed pids 7, 8: 3.0 GiB released (2 freed)",
        ),
        (
            "flush.request",
            {"target": "pid 7", "steps": ["cache"], "for": "pretrain (pid 9)"},
            "automatically requested a flush of pid 7 with the step cache for pretrain (pid 9)",
        ),
        (
            "suspend.receipt",
            {"action": "suspend", "pid": 7, "workload": "lab", "outcome": "suspended", "released_bytes": 1 << 30,
             "reason": "", "requested_for": "pretrain (pid 9)"},
            "automatically suspended lab (pid 7) for pretrain (pid 9): 1.0 GiB released",
        ),
        (
            "resume.receipt",
            {"action": "resume", "pid": 7, "workload": "lab", "outcome": "refused", "released_bytes": None,
             "reason": "2.0 GiB is missing"},
            "couldn't resume lab (pid 7): refused (2.0 GiB is missing)",
        ),
        (
            "resume.receipt",
            {"action": "resume", "pid": 7, "workload": "lab", "outcome": "resumed", "released_bytes": None,
             "returned_bytes": 1 << 30, "reason": ""},
            "resumed lab (pid 7): 1.0 GiB back on the GPU",
        ),
        ("flush.refused", {"problem": "no agent"}, "couldn't flush: no agent"),
        ("engine.returned", {"engine": "chat", "outcome": "woken"}, "returned chat to service (woken)"),
        (
            "action",
            {"labels": [["alertname", "idle"], ["gpu", "3"]], "pids": [*range(10)], "uid": None},
            "ran its action on pids 0, 1, 2, 3, 4, 5, 6, 7 and 2 more for GPU 3",
        ),
        (
            "agent.limit",
            {"pid": 7, "workload": "", "limit_bytes": 1 << 30, "device": None},
            "asked the program (pid 7) to limit each of its allocators to 1.0 GiB",
        ),
        ("agent.limit.answer", {"pid": 7, "reason": "not allowed"}, "pid 7 responded: not allowed"),
        ("agent.end.answer", {"pid": 7, "answer": None}, "pid 7 didn't respond in time, or disconnected"),
        ("rule.override", {"name": "leak", "body": {"for": "5m"}}, "overrode rule leak: for 5m"),
        ("silence.expire", SILENCE, "ended the silence rule=leak"),
        ("release", {"for_seconds": 120.0}, "detached the daemon from the driver for 2 min"),
        ("reload", {"rules": 1, "needs_restart": ["listen"]}, "reloaded the configuration (1 rule defined);"
         " restart to apply: listen"),
    ],
)  # fmt: skip
def test_entry_is_a_sentence(action: str, detail: object, text: str):
    assert audit_sentence(action, detail) == text


@pytest.mark.parametrize(
    ("action", "detail", "text"),
    [
        ("of-a-newer-version", {"target": "all", "steps": ["cache"]}, 'target: all, steps: ["cache"]'),
        ("flush.receipts", {"omitted_bytes": 5000, "sha256": "ab"}, "omitted_bytes: 5000, sha256: ab"),
        ("rule.create", {}, ""),
        ("flush.refused", None, "detail: null"),
        ("action", {"labels": 7, "pids": []}, "labels: 7, pids: []"),
        ("quota.create", "a\x1b[31mb\n", r"detail: a\u001b[31mb\n"),
    ],
)
def test_unknown_shortened_and_damaged_detail_is_shown_as_pairs(action: str, detail: object, text: str):
    assert audit_sentence(action, detail) == f"{action}: {text}"


def test_long_pairs_end_with_a_whole_pair():
    text = detail_text({f"key{number}": "x" * 30 for number in range(9)})
    assert text == f"key0: {'x' * 30}, key1: {'x' * 30}, …"
    assert len(detail_text({"key": "x" * 500})) <= MAX_DETAIL_LENGTH + 3
