"""The documented limits are those of the code (docs/reference/limits.md)."""

from __future__ import annotations

import re
from pathlib import Path

from gpumond.agent.allocators.torch import MAX_ENTRIES
from gpumond.agent.measure import snapshots
from gpumond.agent.measure.oom import MAX_RECORD_BYTES
from gpumond.agent.registry import FLUSHES
from gpumond.agent.requests import MAX_RECORD_SECONDS
from gpumond.devices.child.supervisor import DEADLINE_SECONDS
from gpumond.facts.messages import MAX_MESSAGE_BYTES
from gpumond.facts.program import OOMS, SCOPES
from gpumond.features.alerts.outbox import QUEUE_LIMIT
from gpumond.features.baselines.recordings import MAX_BASELINES
from gpumond.features.flush.flusher import COOLDOWN_SECONDS, RECEIPTS_KEPT
from gpumond.features.flush.hook import REMEMBERED
from gpumond.features.flush.hook_routes import MAX_ALERTS, MAX_LABEL, MAX_LABELS
from gpumond.features.quotas.admissions import IN_TOTAL, PER_OWNER
from gpumond.features.quotas.quotas import SENT_PER_HOUR
from gpumond.features.quotas.registry import MAX_QUOTAS
from gpumond.features.rules.registry import MAX_RULES
from gpumond.features.silences import silences
from gpumond.features.silences.routes import MAX_MATCHERS, MAX_VALUE
from gpumond.features.silences.silences import MAX_COMPILED_BYTES, MAX_EXPRESSION
from gpumond.host.logs import MAX_CHARACTERS, PER_SECOND
from gpumond.host.machine import MAX_CONNECTIONS, RESERVED_CONNECTIONS, http_connections_of_user
from gpumond.metrics.catalogue import PROCESSES_PER_DEVICE
from gpumond.metrics.exposition import MAX_SERIES
from gpumond.metrics.telemetry import MAX_WORKLOADS
from gpumond.programs.connection import Limits
from gpumond.serve.http import MAX_HEAD_BYTES, MAX_PIPELINED, MAX_UNSENT_BYTES, MAX_UNSENT_BYTES_OF_USER
from gpumond.serve.limits import (
    CHANGES_AT_ONCE,
    CHANGES_PER_SECOND,
    CONCURRENT_REQUESTS,
    FAILURES_PER_MINUTE,
    FLUSHES_PER_MINUTE,
    MAX_BODY_BYTES,
    MAX_PREVIEWS,
    RECEIVER_TESTS_PER_MINUTE,
    SILENCES_PER_MINUTE,
    WAITING,
)
from gpumond.serve.listener import HEAD_SECONDS
from gpumond.serve.live import MAX_STREAMS
from gpumond.serve.token_reviews import KNOWN_SECONDS, PENDING, REVIEW_SECONDS
from gpumond.store.retention import Bounds
from gpumond.tick.claims import MAX_POOLS, MAX_POOLS_OF_UID, MAX_REPORTED_POOLS
from gpumond.tick.history import MAX_PROCESSES

ROOT = Path(__file__).parents[2]


BOUNDS = Bounds()
LIMITS = Limits()
KIB, MIB = 1 << 10, 1 << 20


def number(value: float) -> str:
    return {4: "four", 10: "ten"}[int(value)]


STATED = {
    "a message of an agent": f"{MAX_MESSAGE_BYTES // KIB} KiB",
    "agents of one user": f"{LIMITS.peers_per_uid}",
    "agents in all": f"{LIMITS.peers}",
    "connections without a hello message": f"{LIMITS.pending_per_uid} of one user, {LIMITS.pending} in all",
    "time for a hello message; for the rest of a message": f"{LIMITS.hello_seconds:g} s, "
    f"{LIMITS.shared_hello_seconds:g} s while the user has other connections without one; {LIMITS.message_seconds:g} s",
    "age of a report; time without a message": f"{LIMITS.stale_seconds:g} s; {LIMITS.idle_seconds:g} s",
    "messages and bytes of one user": f"{LIMITS.messages_per_second} and {LIMITS.bytes_per_second // MIB} MiB a second",
    "pools of one agent": f"{MAX_POOLS}",
    "pools of all agents of one user": f"{MAX_POOLS_OF_UID:,}, then an equal share for each agent",
    "the record of an out-of-memory error": f"{MAX_RECORD_BYTES // KIB} KiB, {number(OOMS)} in a report; 50 ms",
    "snapshots of one program for requests": f"one in {number(snapshots.REQUEST_SECONDS)} seconds, the newest "
    f"{number(snapshots.KEPT)}, {snapshots.MAX_BYTES // MIB} MiB each",
    "a recording (`--record`)": f"{MAX_RECORD_SECONDS / 60:g} minutes, {MAX_ENTRIES:,} entries",
    "pools of one message": f"{MAX_REPORTED_POOLS}",
    "scopes of one program": f"{SCOPES} names",
    "commands that an agent carries out": f"{FLUSHES[0]} at once, one more each {FLUSHES[1]:g} s",
    "flushes of one program": f"one each {COOLDOWN_SECONDS:g} s",
    "limits that quotas set in programs of one user": f"{SENT_PER_HOUR} an hour",
    "flushes of one caller": f"{FLUSHES_PER_MINUTE} a minute",
    "alerts of one notification of Alertmanager; starts of alerts that are remembered for each caller": f"{MAX_ALERTS}"
    f", with {MAX_LABELS} labels of {MAX_LABEL:,} characters; {REMEMBERED:,}",
    "wrong tokens or passwords of one user": f"{FAILURES_PER_MINUTE} a minute",
    "tokens of Kubernetes service accounts": f"{PENDING} reviews at once, of {REVIEW_SECONDS:g} s each; a result is "
    f"kept for {KNOWN_SECONDS:g} s",
    "HTTP connections": f"{MAX_CONNECTIONS}, {http_connections_of_user(MAX_CONNECTIONS)} of one user",
    "connections for `/metrics` and probes alone": f"{RESERVED_CONNECTIONS} more",
    "requests on a connection that wait for an earlier answer": f"{MAX_PIPELINED}",
    "concurrent reads of one user": f"{CONCURRENT_REQUESTS} at once, {WAITING} more wait",
    "other requests of one user": f"{CHANGES_PER_SECOND} a second, {CHANGES_AT_ONCE} at once",
    "unread answers": f"{MAX_UNSENT_BYTES // MIB} MiB, {MAX_UNSENT_BYTES_OF_USER // MIB} MiB of one user",
    "a request's head; its body": f"{MAX_HEAD_BYTES // KIB} KiB in {HEAD_SECONDS:g} s; {MAX_BODY_BYTES // KIB} KiB",
    "streams of events": f"{MAX_STREAMS}",
    "requests for memory (`gpumond run --need`)": f"{PER_OWNER} of one user, {IN_TOTAL} in all",
    "previews of rules": f"{MAX_PREVIEWS} in progress, one of a user",
    "series of processes": f"{PROCESSES_PER_DEVICE} processes a device",
    "workloads with counts of flushes": f"{MAX_WORKLOADS}",
    "series of a page": f"{MAX_SERIES:,}",
    "processes with a history": f"{MAX_PROCESSES}",
    "rules over the API": f"{MAX_RULES}",
    "silences of one caller; ended silences of one caller": f"{silences.MAX_SILENCES}; {silences.KEEP_ENDED}, "
    f"for {silences.KEEP_ENDED_SECONDS / 86400:g} days",
    "a silence": f"{MAX_MATCHERS} matchers, {MAX_VALUE} characters of a value, {MAX_EXPRESSION} of a regular "
    f"expression and {silences.MAX_EXPRESSIONS} of all, {MAX_COMPILED_BYTES // MIB} MiB for a compiled one, "
    f"{silences.MAX_SECONDS / 86400:g} days",
    "compiled regular expressions of silences": f"{silences.MAX_COMPILED_OF_CREATOR // MIB} MiB of one caller, "
    f"{silences.MAX_COMPILED_IN_TOTAL // MIB} MiB in all",
    "changes of silences by one caller; test messages": f"{SILENCES_PER_MINUTE} a minute; {RECEIVER_TESTS_PER_MINUTE}",
    "quotas over the API": f"{MAX_QUOTAS}",
    "baselines": f"{MAX_BASELINES}",
    "receipts, events in memory": f"{RECEIPTS_KEPT} each",
    "the audit (administrators; each other user); receipts; past alerts": f"{BOUNDS.max_entries:,}; "
    f"{BOUNDS.max_entries_of_a_user:,}; {BOUNDS.max_receipts:,}; {BOUNDS.max_past_alerts:,}, "
    f"for {BOUNDS.seconds / 86400:g} days",
    "the store": f"{BOUNDS.max_bytes // MIB} MiB",
    "alerts waiting for one receiver": f"{QUEUE_LIMIT:,}",
    "a log line; lines of a kind": f"{MAX_CHARACTERS} characters; {PER_SECOND} a second",
    "a driver call": f"{DEADLINE_SECONDS:g} s",
    "the service's memory, tasks": "512 MiB, 64",
}


def test_documented_limits_equal_those_of_the_code():
    text = (ROOT / "docs" / "reference/limits.md").read_text().partition("\n## Sizing\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    assert dict(rows[1:]).keys() == STATED.keys()
    wrong = {of: (stated, STATED[of]) for of, stated in rows[1:] if not stated.startswith(STATED[of])}
    assert wrong == {}
    service = (ROOT / "deploy/systemd/gpumond.service").read_text()
    assert "MemoryMax=512M\nTasksMax=64\n" in service
