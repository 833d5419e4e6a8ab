"""``gpumond record``: write each snapshot of a daemon as one JSON line, or as CSV, for ``gpumond diagnose``, with the
importer of these lines; or as a Chrome trace, which Perfetto shows next to those of torch.profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option, positive_type, print_error
from gpumond.cli.progress import with_progress
from gpumond.facts import units
from gpumond.facts.errors import ConfigError, DaemonError, ProtocolError
from gpumond.facts.frame import Frame, Ledger
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import Snapshot
from gpumond.features.recordings.csv_log import CSV_HEADER, csv_lines
from gpumond.features.recordings.reader import LogLines, Remarks
from gpumond.features.recordings.snapshots import Format
from gpumond.host.files import unwritable_text
from gpumond.tick.ledger import make_ledger
from gpumond.view.text import printable

POLLS_PER_TICK = 4
MIN_POLL_SECONDS, FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.1, 0.5
UNAVAILABLE = 503


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--out FILE", "file to append to (default: standard output)", type=Path)
    add_option(
        parser,
        "--for DURATION",
        "how long to record, such as 10m (default: until Ctrl-C)",
        dest="duration",
        type=positive_type(units.parse_seconds_argument),
        default=float("inf"),
    )
    add_option(
        parser,
        "--csv",
        "write CSV for `gpumond diagnose`: used, live and held bytes by device and process",
    )
    add_option(
        parser,
        "--perfetto FILE",
        "write a trace for Perfetto, with flushes and out-of-memory errors",
        type=Path,
    )
    add_option(parser, "--json", "with --out or --perfetto: at the end, print a summary as JSON")
    client.add_url(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and arguments.out is None and arguments.perfetto is None:
        raise ConfigError("--json requires --out or --perfetto; without them, the output is JSON already")
    if arguments.perfetto is not None:
        return _record_trace(arguments)
    count = missed = 0
    previous: Snapshot | None = None
    try:
        with _open_output(arguments.out) as out:
            if arguments.csv and os.fstat(out.fileno()).st_size == 0:
                out.write(CSV_HEADER.encode())
            for snapshot in snapshots_to_record(arguments):
                out.write(csv_lines(snapshot).encode() if arguments.csv else to_json(snapshot) + b"\n")
                out.flush()
                count += 1
                if previous is not None and snapshot.seq > previous.seq:
                    missed += snapshot.seq - previous.seq - 1
                previous = snapshot
    except KeyboardInterrupt:
        pass
    missing = f", {missed} missed between two requests" if missed else ""
    summary = f"{units.plural(count, 'snapshot')} recorded{missing}"
    return _print_summary(arguments, summary, snapshots=count, missed=missed)


def snapshots_to_record(arguments: argparse.Namespace) -> Iterator[Snapshot]:
    """Yield the snapshots to record, and show their number unless they are shown themselves."""
    snapshots = new_snapshots(arguments.url, arguments.duration)
    to_file = arguments.out or arguments.perfetto or not sys.stdout.isatty()
    return with_progress(snapshots, "snapshots recorded") if to_file else snapshots


def _print_summary(arguments: argparse.Namespace, summary: str, **counts: int) -> int:
    """Print the summary of a recording: as JSON to standard output, or as text to standard error."""
    if arguments.json:
        print(json.dumps(counts))
    else:
        print_error(f"gpumond: {summary}")
    return DONE


TRACED_EVENT_KINDS = frozenset(("flush", "oom", "verdict-began", "verdict-ended", "alert-fired", "process-ended"))
"""Events that are instants of a trace."""
MICROSECONDS_PER_SECOND = 1e6
TRACE_PERIOD_SECONDS = 7_889_238
"""Times in traces of torch.profiler (2.4 and later) begin at the last multiple of this period, a quarter of a year."""
TraceEvent = dict[str, Any]


def trace_base_time(at: float) -> int:
    """Return the Unix time from which torch.profiler counts the times of a trace."""
    return int(at // TRACE_PERIOD_SECONDS) * TRACE_PERIOD_SECONDS


class CounterTracks:
    """Bytes by share, of each program and of the rest of a device. A share or program that is gone has 0 once more,
    since a counter of a trace doesn't change by itself.
    """

    def __init__(self, base_time: int) -> None:
        self._base_time = base_time
        self._last: dict[tuple[int, str], dict[str, int]] = {}

    def counters(self, frame: Frame) -> Iterator[TraceEvent]:
        """Yield the values of all tracks at one time."""
        at = (frame.snapshot.taken_at - self._base_time) * MICROSECONDS_PER_SECOND
        gpus = frame.snapshot.gpu_labels
        now: dict[tuple[int, str], dict[str, int]] = {}
        for line in frame.ledger.lines:
            shares = now.setdefault((line.pid or 0, line.device_uuid), {})
            shares[line.share] = shares.get(line.share, 0) + line.used_bytes
        before, self._last = self._last, now
        for pid, uuid in {**before, **now}:
            if uuid in gpus:
                shares = dict.fromkeys(before.get((pid, uuid), ()), 0) | now.get((pid, uuid), {})
                yield {"ph": "C", "pid": pid, "name": f"GPU {gpus[uuid]} memory", "ts": at, "args": shares}


def program_names(ledger: Ledger, named_pids: set[int]) -> Iterator[TraceEvent]:
    """Yield the names of the programs that are not in ``named_pids`` yet, and add these."""
    names = {0: "devices"} | {
        line.pid: f"{line.workload or 'process'} (gpumond)" for line in ledger.lines if line.pid is not None
    }
    for pid, name in names.items():
        if pid not in named_pids:
            named_pids.add(pid)
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": printable(name)}}


def instants(events: Iterable[Mapping[str, Any]], base_time: int) -> Iterator[TraceEvent]:
    """Yield the events of a daemon that a trace shows."""
    for event in events:
        if event["kind"] in TRACED_EVENT_KINDS:
            yield {
                "ph": "i",
                "s": "g",
                "pid": event["pid"] or 0,
                "tid": 0,
                "name": event["kind"],
                "ts": (event["at"] - base_time) * MICROSECONDS_PER_SECOND,
                "args": {"summary": printable(event["summary"])},
            }


def _record_trace(arguments: argparse.Namespace) -> int:
    """Write a trace. The file is complete when the recording ends, by Ctrl-C or after its duration."""
    if arguments.csv or arguments.out is not None:
        raise ConfigError("--perfetto can't be combined with --csv or --out")
    named_pids: set[int] = set()
    count, base_time = 0, trace_base_time(time.time())
    tracks = CounterTracks(base_time)
    events = _events(arguments.url)
    last_event_id = events[-1]["id"] if events else 0
    try:
        with open(arguments.perfetto, "w", encoding="utf-8") as out:
            out.write(f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {base_time * 10**9}, "traceEvents": [\n')
            separator = ""

            def add(entries: Iterable[TraceEvent]) -> None:
                nonlocal separator
                for entry in entries:
                    out.write(separator + json.dumps(entry))
                    separator = ",\n"

            try:
                frame: Frame | None = None
                for snapshot in snapshots_to_record(arguments):
                    frame = Frame(snapshot, make_ledger(snapshot, frame))
                    add(program_names(frame.ledger, named_pids))
                    add(tracks.counters(frame))
                    count += 1
            except KeyboardInterrupt:
                pass
            finally:
                add(instants(_events(arguments.url, last_event_id), base_time))
                out.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"--perfetto {unwritable_text(arguments.perfetto, error)}") from None
    summary = f"{units.plural(count, 'snapshot')} recorded; open the file in https://ui.perfetto.dev"
    return _print_summary(arguments, summary, snapshots=count)


def _events(url: str, last_id: int = 0) -> list[dict[str, Any]]:
    """Return the daemon's events after an id, at most the newest thousand; none while it cannot be reached."""
    try:
        return client.events(url, last_id)
    except DaemonError:
        return []


def new_snapshots(url: str, duration_seconds: float) -> Iterator[Snapshot]:
    """Yield every snapshot that the daemon takes from now on, once. If the daemon becomes unavailable later, wait.

    Raises DaemonError if there is no daemon at first.
    """
    end = time.monotonic() + duration_seconds
    previous: Snapshot | None = None
    poll_seconds = FIRST_POLL_SECONDS
    is_unreachable = False
    while time.monotonic() < end:
        try:
            snapshot = from_json(Snapshot, to_json(client.get(url, "/api/v1/snapshot")))
        except ProtocolError as error:
            raise DaemonError(
                f"can't decode the daemon's snapshot ({error}); check that the daemon and this command have the same "
                "version"
            ) from None
        except DaemonError as error:
            if previous is None and error.status != UNAVAILABLE:
                raise
            if not is_unreachable:
                print_error(f"gpumond: {error}; waiting for the daemon")
            is_unreachable = True
            time.sleep(MAX_POLL_SECONDS)
            continue
        is_unreachable = False
        if previous is None or (snapshot.seq, snapshot.taken_at) != (previous.seq, previous.taken_at):
            if previous is not None and snapshot.seq == previous.seq + 1:
                tick_seconds = snapshot.elapsed_seconds - previous.elapsed_seconds
                poll_seconds = min(MAX_POLL_SECONDS, max(MIN_POLL_SECONDS, tick_seconds / POLLS_PER_TICK))
            previous = snapshot
            yield snapshot
        time.sleep(poll_seconds)


def _open_output(path: Path | None) -> nullcontext[BinaryIO] | BinaryIO:
    if path is None:
        return nullcontext(sys.stdout.buffer)
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644), "ab")
    except OSError as error:
        raise ConfigError(f"--out {unwritable_text(path, error)}") from None


def read(
    lines: LogLines, remarks: Remarks, size_bytes: int | None, interval_seconds: float | None
) -> Iterator[Snapshot]:
    """Yield the snapshots of a recording of ``gpumond record``, one in each line.

    After a restart of the daemon, elapsed seconds continue from the last snapshot.
    """
    previous: Snapshot | None = None
    offset_seconds = 0.0
    for line in lines:
        try:
            snapshot = from_json(Snapshot, line.encode())
        except ProtocolError as error:
            if lines.is_complete:
                remarks.skip(lines.number, str(error))
            continue
        remarks.rows += 1
        if previous is not None:
            if (snapshot.seq, snapshot.taken_at) == (previous.seq, previous.taken_at):
                remarks.duplicates += 1
                continue
            if snapshot.elapsed_seconds + offset_seconds <= previous.elapsed_seconds:
                remarks.note(
                    "back", f"line {lines.number}: the daemon was restarted; time continues from the last snapshot"
                )
                passed_seconds = max(1.0, snapshot.taken_at - previous.taken_at)
                offset_seconds = previous.elapsed_seconds + passed_seconds - snapshot.elapsed_seconds
        if offset_seconds:
            snapshot = replace(snapshot, elapsed_seconds=snapshot.elapsed_seconds + offset_seconds)
        previous = snapshot
        yield _with_size(snapshot, size_bytes)


def _with_size(snapshot: Snapshot, size_bytes: int | None) -> Snapshot:
    if size_bytes is None or all(device.size_bytes is not None for device in snapshot.devices):
        return snapshot
    devices = tuple(
        replace(device, size_bytes=size_bytes) if device.size_bytes is None else device for device in snapshot.devices
    )
    return replace(snapshot, devices=devices)


def _is_snapshot(line: str) -> bool:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and {"seq", "elapsed_seconds"} <= body.keys()


FORMAT = Format("gpumond", _is_snapshot, read)
