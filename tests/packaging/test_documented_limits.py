"""The documented limits are those of the code (docs/reference/limits.md)."""

from __future__ import annotations

import re
from pathlib import Path

from gpumond.agent.allocators.torch import MAX_HISTORY_ENTRIES
from gpumond.agent.loaded_allocators import FLUSH_RATE, PLAN_RATE
from gpumond.agent.measure import snapshots
from gpumond.agent.measure.oom_record import MAX_RECORD_BYTES
from gpumond.agent.requests import MAX_RECORD_SECONDS
from gpumond.devices.child.supervisor import DEADLINE_SECONDS
from gpumond.facts.messages import MAX_MESSAGE_BYTES
from gpumond.facts.program import MAX_OOMS, MAX_SCOPES
from gpumond.features.alerts.outbox import QUEUE_LIMIT
from gpumond.features.baselines.recorder import MAX_BASELINES
from gpumond.features.flush.alertmanager_hook import MAX_FIRINGS_PER_CALLER
from gpumond.features.flush.flusher import COOLDOWN_SECONDS, MAX_RECEIPTS
from gpumond.features.flush.routes import MAX_ALERTS, MAX_LABEL_LENGTH, MAX_LABELS
from gpumond.features.quotas.admissions import MAX_REQUESTS, MAX_REQUESTS_PER_USER
from gpumond.features.quotas.borrow import MAX_REQUESTS_PER_HOUR
from gpumond.features.quotas.cgroups import MAX_OWN_LIMITS
from gpumond.features.quotas.quotas import MAX_LIMITS_PER_HOUR, MAX_QUOTAS
from gpumond.features.rules.registry import MAX_RULES
from gpumond.features.silences import silences
from gpumond.features.silences.routes import MAX_MATCHERS, MAX_VALUE_CHARACTERS
from gpumond.features.silences.silences import MAX_COMPILED_BYTES, MAX_EXPRESSION_CHARACTERS
from gpumond.host.logs import MAX_CHARACTERS, MAX_PER_SECOND
from gpumond.host.machine import MAX_CONNECTIONS, RESERVED_CONNECTIONS, max_http_connections_per_user
from gpumond.metrics.catalog import MAX_PROCESSES_PER_DEVICE
from gpumond.metrics.exposition import MAX_SERIES
from gpumond.metrics.owners import MAX_OWNERS, OWNER_RETENTION_SECONDS
from gpumond.metrics.telemetry import MAX_WORKLOADS
from gpumond.programs.agent_connection import SocketLimits
from gpumond.serve.authentication import (
    ACCOUNT_CACHE_SECONDS,
    MAX_PENDING_REVIEWS,
    MAX_SIGN_INS,
    MAX_SIGN_INS_PER_CALLER,
    REVIEW_TIMEOUT_SECONDS,
)
from gpumond.serve.http import MAX_HEAD_BYTES, MAX_PIPELINED, MAX_UNSENT_BYTES, MAX_UNSENT_BYTES_OF_USER
from gpumond.serve.limits import (
    CHANGES_AT_ONCE,
    CHANGES_PER_SECOND,
    FAILED_SIGN_INS_PER_MINUTE,
    FLUSHES_PER_MINUTE,
    MAX_BODY_BYTES,
    MAX_CONCURRENT_REQUESTS,
    MAX_PREVIEWS,
    MAX_WAITING_REQUESTS,
    RECEIVER_TESTS_PER_MINUTE,
    SILENCES_PER_MINUTE,
)
from gpumond.serve.listener import HEAD_TIMEOUT_SECONDS
from gpumond.serve.live import MAX_STREAMS
from gpumond.store.store import StoreLimits
from gpumond.tick.claims import MAX_POOLS, MAX_POOLS_OF_UID
from gpumond.tick.history import MAX_PROCESSES

ROOT = Path(__file__).parents[2]


BOUNDS = StoreLimits()
LIMITS = SocketLimits()
KIB, MIB = 1 << 10, 1 << 20


def number(value: float) -> str:
    return {4: "four", 10: "ten"}[int(value)]


STATED = {
    "an agent's message": f"{MAX_MESSAGE_BYTES // KIB} KiB",
    "agents per user": f"{LIMITS.connections_per_uid}",
    "agents in total": f"{LIMITS.connections:,}",
    "connections without a hello message": f"{LIMITS.pending_per_uid} per user, {LIMITS.pending} in total",
    "time for a hello message": f"{LIMITS.hello_seconds:g} s, or "
    f"{LIMITS.shared_hello_seconds:g} s while the user has other connections without a hello message",
    "time to receive a message, from its first byte": f"{LIMITS.message_seconds:g} s",
    "age of a report": f"{LIMITS.stale_seconds:g} s",
    "time without a message from an agent": f"{LIMITS.idle_seconds:g} s",
    "messages and bytes per user": f"{LIMITS.messages_per_second} and {LIMITS.bytes_per_second // MIB} MiB a second",
    "pools per agent": f"{MAX_POOLS}",
    "pools per user": f"{MAX_POOLS_OF_UID:,}; if a user has more, each of the user's agents gets an equal portion",
    "size of an out-of-memory record": f"{MAX_RECORD_BYTES // KIB} KiB",
    "out-of-memory records in a report": number(MAX_OOMS),
    "time to record an out-of-memory error": "50 ms",
    "snapshots that you request": f"one every {snapshots.REQUEST_INTERVAL_SECONDS:g} s per program",
    "a program's snapshot files": f"the latest {number(snapshots.MAX_FILES)}, {snapshots.MAX_BYTES // MIB} MiB each",
    "length of a recording of allocations (`--record`)": f"{MAX_RECORD_SECONDS / 60:g} minutes",
    "entries of a recording of allocations": f"{MAX_HISTORY_ENTRIES:,}",
    "recordings of allocations at a time per program": "one",
    "measured scopes per program": f"{MAX_SCOPES} names",
    "flushes that an agent executes": f"a burst of {FLUSH_RATE[0]}, then one every {FLUSH_RATE[1]:g} s",
    "[plans](terms.md#actions) that an agent makes": f"a burst of {PLAN_RATE[0]}, then one a second"
    * (PLAN_RATE[1] == 1),
    "flushes per program": f"one every {COOLDOWN_SECONDS:g} s by rules",
    "limits that quotas set, per user": f"{MAX_LIMITS_PER_HOUR} an hour",
    "flushes per caller": f"{FLUSHES_PER_MINUTE} a minute",
    "[borrow](../how-to/borrow.md) requests that lead to a flush, per user": f"{MAX_REQUESTS_PER_HOUR} an hour",
    "alerts in one Alertmanager notification": f"{MAX_ALERTS}, each with {MAX_LABELS} labels of {MAX_LABEL_LENGTH:,} "
    "characters",
    "Alertmanager alerts recorded as handled, per caller": f"{MAX_FIRINGS_PER_CALLER:,}",
    "wrong tokens or passwords per user": f"{FAILED_SIGN_INS_PER_MINUTE} a minute",
    "sign-in codes, and browser sessions": f"{MAX_SIGN_INS_PER_CALLER} of each per caller, {MAX_SIGN_INS} in total",
    "reviews of Kubernetes service-account tokens": f"{MAX_PENDING_REVIEWS} at once, for at most "
    f"{REVIEW_TIMEOUT_SECONDS:g} s each",
    "age of a token review's result": f"{ACCOUNT_CACHE_SECONDS:g} s",
    "HTTP connections": f"a quarter of the file descriptors, at most {MAX_CONNECTIONS:,}; "
    f"at most {max_http_connections_per_user(MAX_CONNECTIONS)} per user",
    "connections reserved for `/metrics` and probes": f"{RESERVED_CONNECTIONS} more",
    "requests that wait for an earlier response, per connection": f"{MAX_PIPELINED}",
    "reads per user": f"{MAX_CONCURRENT_REQUESTS} at once, {MAX_WAITING_REQUESTS} more wait",
    "requests per user other than reads": f"{CHANGES_PER_SECOND} a second, {CHANGES_AT_ONCE} at once",
    "unread responses": f"{MAX_UNSENT_BYTES // MIB} MiB, {MAX_UNSENT_BYTES_OF_USER // MIB} MiB per user",
    "a request's line and headers": f"{MAX_HEAD_BYTES // KIB} KiB in {HEAD_TIMEOUT_SECONDS:g} s",
    "a request's body": f"{MAX_BODY_BYTES // KIB} KiB",
    "event streams": f"{MAX_STREAMS}",
    "requests for memory (`gpumond run --need`)": f"{MAX_REQUESTS_PER_USER} per user, {MAX_REQUESTS} in total",
    "rule previews in progress": f"{MAX_PREVIEWS}",
    "rule previews in progress per user": "1",
    "processes with series": f"the {MAX_PROCESSES_PER_DEVICE} largest processes per device",
    "[owners](recorded-series.md#new-series-per-day) with series": f"{MAX_OWNERS} with a workload and {MAX_OWNERS} "
    f"without; an owner keeps its series for {OWNER_RETENTION_SECONDS / 3600:g} h",
    "workloads with flush counters": f"{MAX_WORKLOADS}",
    "series in a scrape": f"{MAX_SERIES:,}",
    "processes with a history": f"{MAX_PROCESSES:,}",
    "rules created through the API": f"{MAX_RULES}",
    "silences per caller": f"{silences.MAX_SILENCES}",
    "ended silences per caller": f"{silences.MAX_ENDED}, for {silences.ENDED_SECONDS / 86400:g} days",
    "a silence": f"{silences.MAX_SECONDS / 86400:g} days; {MAX_MATCHERS} matchers with {MAX_VALUE_CHARACTERS} "
    f"characters per value; {MAX_EXPRESSION_CHARACTERS} characters per regular expression, "
    f"{silences.MAX_TOTAL_EXPRESSION_CHARACTERS} in total, "
    f"{MAX_COMPILED_BYTES // MIB} MiB each once compiled",
    "compiled regular expressions in silences": f"{silences.MAX_COMPILED_OF_CREATOR // MIB} MiB per caller, "
    f"{silences.MAX_COMPILED_IN_TOTAL // MIB} MiB in total",
    "silence changes per caller": f"{SILENCES_PER_MINUTE} a minute",
    "test messages to alert receivers": f"{RECEIVER_TESTS_PER_MINUTE} a minute",
    "quotas created through the API": f"{MAX_QUOTAS}",
    "containers whose [`cgroup_limit`](../how-to/container-limits.md) the daemon can change or remove": (
        f"{MAX_OWN_LIMITS:,}"
    ),
    "baselines": f"{MAX_BASELINES}",
    "receipts and events in memory": f"{MAX_RECEIPTS:,} of each",
    "audit entries of administrators, rules and gpumond itself": (
        f"{BOUNDS.max_audit_entries:,}, for {BOUNDS.max_age_seconds / 86400:g} days"
    ),
    "audit entries of each other user": f"{BOUNDS.max_audit_entries_of_user:,}",
    "receipts in the store": f"{BOUNDS.max_receipts:,}",
    "past alerts": f"{BOUNDS.max_past_alerts:,}",
    "the store": f"{BOUNDS.max_bytes // MIB} MiB",
    "alerts queued for one receiver": f"{QUEUE_LIMIT:,}",
    "a log line": f"{MAX_CHARACTERS:,} characters",
    "log lines of one kind": f"{MAX_PER_SECOND} a second",
    "time for a driver call": f"{DEADLINE_SECONDS:g} s",
    "the service's memory": "512 MiB",
    "the service's tasks": "64",
}


def test_documented_limits_equal_those_of_the_code():
    text = (ROOT / "docs" / "reference/limits.md").read_text().partition("\n## Sizing\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    assert dict(rows[1:]).keys() == STATED.keys()
    wrong = {of: (stated, STATED[of]) for of, stated in rows[1:] if not stated.startswith(STATED[of])}
    assert wrong == {}
    service = (ROOT / "deploy/systemd/gpumond.service").read_text()
    assert "MemoryMax=512M\nTasksMax=64\n" in service
