"""HTTP client that the commands use to reach the daemon.

A daemon of this machine is asked over its Unix socket, where the kernel names both sides, if the address is the default
one. Another address is asked as it is: a change carries the token in $GPUMOND_TOKEN, or the token file of a daemon on
this machine, and a read does if it is refused without one. Without a readable token, a change goes over the socket.
Token file and socket are in $GPUMOND_RUNTIME_DIR, else in the default runtime directory of this user's or the machine's
daemon. `gpumond.host.http` proves who receives a token.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from gpumond.agent.transport import trusted_uids
from gpumond.cli.arguments import (
    DONE,
    FAILED,
    NOTHING_TO_DO,
    WRONG_USE,
    add_option,
    parse_address,
    print_error,
    with_typed_option,
)
from gpumond.facts.errors import (
    LIST_PROGRAMS_HINT,
    AmbiguousDevice,
    ConfigError,
    DaemonError,
    GpumondError,
    HttpError,
    NoSuchDevice,
    did_you_mean,
)
from gpumond.facts.frame import find_device_uuid
from gpumond.facts.snapshot import DeviceReading
from gpumond.host import http
from gpumond.host.files import read_secret
from gpumond.host.http import (
    LOCAL_HOSTS,
    Connection,
    HttpRequest,
    check_token,
    connection_to,
    exchange,
    is_loopback,
    response_to,
    tls_context,
)
from gpumond.host.runtime_directory import TOKEN_FILE, nonstandard_directory, runtime_directories
from gpumond.view.frame import FRAME_ROUTE, CheckedFrame, checked_as, decode_response, frame_of
from gpumond.view.text import output_width, wrap_text

DEFAULT_URL = "http://127.0.0.1:9917"
READ_SECONDS, CHANGE_SECONDS = 10.0, 30.0
COMMANDS_IN_TEXTS = (
    "alerts audit baseline doctor events flush limit oom queue quota receipts resume rules run silence "
    "snapshot status suspend top verdicts why"
)
COMMAND_START = re.compile(rf"\bgpumond (?=(?:{COMMANDS_IN_TEXTS.replace(' ', '|')})\b)")
"""The start of a command that texts of the daemon contain."""
DOWNLOAD_SECONDS = 60.0
"""Longest wait for the next bytes of a download."""
CHUNK_BYTES = 1 << 20
STARTING_SECONDS, RETRY_SECONDS = 3.0, 0.2
"""Time during which a read is repeated while the daemon starts, and between two requests."""
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, UNPROCESSABLE, UNAVAILABLE = 401, 403, 404, 422, 503
MAX_CONCURRENT_REQUESTS = 16
"""Number of programs that are asked at the same time."""


NO_TOKEN_TEXT = (
    "the daemon requires a token: set GPUMOND_TOKEN to one or, if you may read the daemon's own token, "
    "GPUMOND_RUNTIME_DIR to its directory"
)

has_responded = False
"""Whether a daemon, or another server, has sent content to this process."""


class Endpoint(NamedTuple):
    """A connection to the daemon, the path before those of the API, and the token that the request carries, with its
    source; all three may be empty.
    """

    connection: Connection
    prefix: str
    token: str
    token_source: str

    def request(
        self, method: str, path: str, headers: Mapping[str, str] = {}, body: bytes | None = None
    ) -> HttpRequest:
        own_headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        if operation := os.environ.get("GPUMOND_OPERATION"):
            own_headers["Gpumond-Operation"] = operation
        return HttpRequest(method, self.prefix + path, {**headers, **own_headers}, body)


class TargetProgram(NamedTuple):
    pid: int
    workload: str

    def __str__(self) -> str:
        return f"{self.workload} (pid {self.pid})" if self.workload else f"pid {self.pid}"


def add_arguments(parser: argparse.ArgumentParser, entries: str = "") -> None:
    """Add the daemon's address and the forms of the output. ``entries``: what CSV has a row for."""
    add_url(parser)
    form = parser.add_mutually_exclusive_group()
    add_option(form, "--json", "print JSON")
    if entries:
        add_option(form, "--csv", f"print {entries} as CSV; the columns are the keys of the JSON")


def add_url(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "--url URL",
        f"your daemon's address (default: $GPUMOND_URL, then {DEFAULT_URL})",
        type=parse_address,
        default=default_url(),
    )


def default_url() -> str:
    return os.environ.get("GPUMOND_URL") or DEFAULT_URL


def command_line(words: str, url: str) -> str:
    """Return the command line that reaches this machine's daemon at ``url`` from a shell without the directory's
    variable.

    ``words``: the command with its arguments.
    """
    directory = nonstandard_directory(next(runtime_directories()))
    if directory is None:
        return f"{_url_variable(url, DEFAULT_URL)}{program_command()} {words}"
    # without the variable, the request goes over the directory's socket
    url_variable = _url_variable(url, DEFAULT_URL) if os.environ.get("GPUMOND_URL") else ""
    return f"GPUMOND_RUNTIME_DIR={shlex.quote(str(directory))} {url_variable}{program_command()} {words}"


def with_commands(text: str, url: str) -> str:
    """Return a daemon's text with its commands as they reach the daemon from the shell that started this process."""
    command = f"{_url_variable(url, parse_address(default_url()))}{program_command()} "
    return COMMAND_START.sub(lambda match: command, text)


def _url_variable(url: str, default: str) -> str:
    """Return the variable that names a daemon's address; empty if the shell's commands reach it at ``default``."""
    address = url.rstrip("/")
    return "" if address == default.rstrip("/") else f"GPUMOND_URL={shlex.quote(address)} "


def paragraph(text: str, url: str) -> str:
    """Return a daemon's text for standard output: its commands reach the daemon, and its lines fit a terminal."""
    return wrap_text(with_commands(text, url), output_width())


def program_command() -> str:
    """Return what starts this program in another terminal: `gpumond`, if the shell finds the same one."""
    program, installed = Path(sys.argv[0]), shutil.which("gpumond")
    is_module = program.parts[-2:] == ("gpumond", "__main__.py")
    if not is_module and program.name not in ("gpumond", "gpumond-python"):
        return "gpumond"
    script = Path(sys.executable if is_module else program).with_name("gpumond").absolute()
    if installed and os.path.realpath(installed) == os.path.realpath(script):
        return "gpumond"
    return f"{shlex.quote(sys.executable)} -m gpumond" if is_module else shlex.quote(str(script))


def is_over_socket(url: str) -> bool:
    """Return whether requests to ``url`` may go over a daemon's Unix socket, so that its address is unknown."""
    directory = nonstandard_directory(next(runtime_directories()))
    return url.startswith("unix:") or (directory is not None and url.rstrip("/") == DEFAULT_URL)


def request_address(url: str) -> str:
    """Return the address that requests to ``url`` go to: that of a Unix socket, if they go over one."""
    try:
        connection = _endpoint(url, READ_SECONDS, False).connection
    except (OSError, GpumondError):
        return url
    connection.close()
    return f"unix://{connection.socket_path}" if connection.socket_path else url


def is_local(url: str) -> bool:
    return url.startswith("unix://") or is_loopback(urlsplit(url).hostname)


def user_names(url: str) -> Callable[[int], str | None]:
    """Return what names a user of the daemon's machine, if it's this one: a uid may be somebody else on another."""
    from gpumond.devices.process.procfs import user_name  # needed for callers only

    return user_name if is_local(url) else lambda uid: None


def is_trusted_daemon(url: str) -> bool:
    """Return True if the server at an http:// or https:// address is verified, by TLS or by the kernel.

    Raises DaemonError if nothing can be reached there.
    """
    with _explained_errors(url, READ_SECONDS):
        try:
            http.verify_server(url, READ_SECONDS, _token_recipient_uids())
        except HttpError as error:
            if error.reason != "untrusted":
                raise
            return False
    return True


def resolve_device_uuid(url: str, name: str) -> str:
    """Return the UUID of the device that a name matches. Raises DaemonError, NoSuchDevice, AmbiguousDevice."""
    devices = checked_as(tuple[DeviceReading, ...], get(url, "/api/v1/devices"), "devices")
    fields = ("uuid", "index", "pci_bus_id", "parent_uuid")
    return find_device_uuid(name, [DeviceReading(**{field: each[field] for field in fields}) for each in devices])


def gpu_names(url: str) -> Mapping[str, str]:
    """Return each device's name in a sentence, such as ``GPU 0``, by its UUID; none if the daemon does not answer."""
    with suppress(DaemonError):
        return {each["uuid"]: f"GPU {each['index']}" for each in get(url, "/api/v1/devices")}
    return {}


def ask_programs(
    arguments: argparse.Namespace,
    programs: Sequence[TargetProgram],
    request: str,
    body: Mapping[str, object],
    timeout_seconds: float,
    single_program_option: str | None = None,
) -> tuple[list[tuple[TargetProgram, Any]], int]:
    """Send a request to the programs that the arguments select, at the same time, and print the errors.

    ``single_program_option``: the option that only one program can have. Returns the answers, and the exit code. Raises
    GpumondError.
    """
    if single_program_option is not None and len(programs) > 1:
        names = ", ".join(map(str, programs))
        raise ConfigError(
            f"{single_program_option} needs one process, but {len(programs)} match: {names}; select one with --pid"
        )

    def ask(program: TargetProgram) -> Any:
        try:
            return post(arguments.url, f"/api/v1/agents/{program.pid}/{request}", body, timeout_seconds)
        except DaemonError as error:
            return error

    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C would wait for the threads
    try:
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            answers = list(zip(programs, pool.map(ask, programs), strict=True))
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    errors = [(program, answer) for program, answer in answers if isinstance(answer, DaemonError)]
    for program, error in errors:
        text = with_typed_option(error, arguments)
        print_error(f"gpumond: {text}" if len(programs) == 1 else f"gpumond: {program}: {text}")
    codes = {exit_code_of(arguments, error) for _, error in errors if error.status != NOT_FOUND}
    status = max(codes, default=no_match_exit_code(arguments) if len(errors) == len(programs) else DONE)
    return [(program, answer) for program, answer in answers if not isinstance(answer, DaemonError)], status


def exit_code_of(arguments: argparse.Namespace, error: DaemonError) -> int:
    """Return the exit code after an error about the programs that are selected."""
    if error.status == NOT_FOUND:
        return no_match_exit_code(arguments)
    return WRONG_USE if error.status == UNPROCESSABLE else FAILED


def no_match_exit_code(arguments: argparse.Namespace) -> int:
    """Return the exit code if no program matches a selection: wrong use if no device has the name."""
    try:
        if (name := getattr(arguments, "device", None)) is not None:
            resolve_device_uuid(arguments.url, name)
    except (NoSuchDevice, AmbiguousDevice):
        return WRONG_USE
    return NOTHING_TO_DO


def answers_json(
    arguments: argparse.Namespace, answers: Sequence[tuple[TargetProgram, Any]], name: str | None = None
) -> str:
    """Return the answer of the program that ``--pid`` selects, else a list with each program and its answer.

    ``name``: the key of an answer that is no object.
    """
    if arguments.pid is not None:
        return json.dumps(answers[0][1] if answers else None)
    return json.dumps([{**program._asdict(), **({name: answer} if name else answer)} for program, answer in answers])


def select_programs(arguments: argparse.Namespace) -> list[TargetProgram]:
    """Return the programs with an agent that ``--pid``, ``--workload`` and ``--device`` select, by pid.

    Prints a message if there is none.
    """
    if arguments.pid is not None:
        return [TargetProgram(arguments.pid, "")]
    uuid = None if arguments.device is None else resolve_device_uuid(arguments.url, arguments.device)
    agents = get(arguments.url, "/api/v1/agents")
    programs = [
        TargetProgram(agent["pid"], agent["workload"])
        for agent in agents
        if arguments.workload in (None, agent["workload"])
        and (uuid is None or uuid in {pool["device_uuid"] for pool in agent["pools"]})
    ]
    if not programs:
        names = (("workload", arguments.workload), ("device", arguments.device))
        target = " and ".join(f"{name} {value}" for name, value in names if value is not None)
        hint = did_you_mean(arguments.workload or "", (agent["workload"] for agent in agents))
        print_error(f"gpumond: no program with an agent matches {target}{hint or LIST_PROGRAMS_HINT}")
    return sorted(programs)


def get(
    url: str,
    path: str,
    headers: Mapping[str, str] = {},
    timeout_seconds: float = READ_SECONDS,
    for_change: bool = False,
) -> Any:
    """Return the decoded response to GET. Raises DaemonError.

    Without TLS, a token is sent only if the daemon refuses the request without one. ``for_change``: a change follows,
    so the daemon is verified first, as for that.
    """
    is_verified = for_change or url.startswith("https://")
    try:
        return _send_request("GET", url, path, timeout_seconds, is_verified, headers=headers)
    except DaemonError as error:
        if is_verified or error.status not in (UNAUTHORIZED, FORBIDDEN) or not _token_and_source(url)[0]:
            raise
        if not is_local(url):
            note = "the token wasn't sent, because the connection doesn't use TLS; use an https:// address"
            raise DaemonError(f"the daemon requires a token; {note}", error.status, error.problem) from None
    return _send_request("GET", url, path, timeout_seconds, True, headers=headers)


def events(url: str, last_id: int = 0) -> list[dict[str, Any]]:
    """Return the events after one of them, oldest first. Raises DaemonError."""
    headers = {"Accept": "application/json", "Last-Event-ID": str(last_id)}
    events: list[dict[str, Any]] = get(url, "/api/v1/events", headers)
    return events


def frame(url: str) -> CheckedFrame:
    """Return the daemon's frame. Raises DaemonError."""
    return frame_of(get(url, FRAME_ROUTE))


def post(url: str, path: str, body: object, timeout_seconds: float) -> Any:
    """Return the decoded response to POST, which is sent with a token. Raises DaemonError."""
    return _send_request("POST", url, path, timeout_seconds, True, body)


def put(url: str, path: str, body: object) -> Any:
    return _send_request("PUT", url, path, CHANGE_SECONDS, True, body)


def delete(url: str, path: str) -> None:
    _send_request("DELETE", url, path, CHANGE_SECONDS, True)


def download(url: str, path: str, file: BinaryIO) -> int:
    """Write the response to GET, which is sent as a change is, to a file. Return its size. Raises GpumondError."""
    with _explained_errors(url, DOWNLOAD_SECONDS):
        endpoint = _endpoint(url, DOWNLOAD_SECONDS, with_token=True)
        with response_to(endpoint.connection, endpoint.request("GET", path)) as response:
            if not 200 <= response.status < 300:
                _decode_content(response.status, response.read(CHUNK_BYTES), endpoint, url)  # raises
            size = int(response.headers.get("Content-Length", -1))
            received = 0
            while chunk := response.read(CHUNK_BYTES):
                try:
                    file.write(chunk)
                except OSError as error:  # not of the connection
                    raise GpumondError(f"can't write the response: {error.strerror}") from None
                received += len(chunk)
    if received != size:
        raise DaemonError(f"the download stopped after {received} of {size} bytes; try again")
    return received


def _send_request(
    method: str,
    url: str,
    path: str,
    timeout_seconds: float,
    with_token: bool,
    body: object = None,
    headers: Mapping[str, str] = {},
) -> Any:
    """Return the decoded response. Raises DaemonError. ``with_token``: it carries a token, or goes over the socket.

    A read is repeated for some seconds if the daemon asks for it: it has not read its devices yet.
    """
    encoded = None if body is None else json.dumps(body).encode()
    request_headers = headers if method == "GET" else {"Content-Type": "application/json"}
    deadline = time.monotonic() + STARTING_SECONDS
    while True:
        with _explained_errors(url, timeout_seconds):
            endpoint = _endpoint(url, timeout_seconds, with_token)
            response = exchange(
                endpoint.connection, endpoint.request(method, path, request_headers, encoded), timeout_seconds
            )
        is_starting = method == "GET" and response.status == UNAVAILABLE and "Retry-After" in response.headers
        if not is_starting or time.monotonic() > deadline:
            break
        time.sleep(RETRY_SECONDS)
    global has_responded
    has_responded = True
    if 200 <= response.status < 300 and response.headers.get("Content-Type", "").startswith("text/plain"):
        return None
    return _decode_content(response.status, response.body, endpoint, "" if method == "GET" else url)


@contextmanager
def _explained_errors(url: str, timeout_seconds: float) -> Iterator[None]:
    """Raise DaemonError, with what to do, for a daemon that is not reached."""
    try:
        with http.http_errors(timeout_seconds):
            yield
    except HttpError as error:
        if error.reason in ("address", "untrusted", "too_large", "tls"):
            remedy = "; pass an http:// address, or set up TLS in the daemon" if error.reason == "tls" else ""
            raise DaemonError(f"{url}: {error}{remedy}") from None
        if isinstance(error.__context__, PermissionError):
            raise DaemonError(f"{url}: {error}; connect as the daemon's user or root, or over http://") from None
        runtime_directory = os.environ.get("GPUMOND_RUNTIME_DIR") if url.rstrip("/") == DEFAULT_URL else None
        tried = f", and none listens at {runtime_directory}/api.sock (in $GPUMOND_RUNTIME_DIR)"
        tried = tried if runtime_directory else ""
        environ_url = os.environ.get("GPUMOND_URL")
        address, remedy = url, "correct --url" if error.reason == "dns" else "pass your daemon's address with --url"
        if environ_url and url.endswith(environ_url):  # --url may have been given
            address, remedy = f"{url}, which is from $GPUMOND_URL", "correct the variable"
        start = "" if error.reason == "dns" else "start one with `gpumond serve`, or "
        raise DaemonError(f"no daemon is reachable at {address} ({error}){tried}; {start}{remedy}") from None


def _decode_content(status: int, body: bytes, endpoint: Endpoint, url: str) -> Any:
    """Return the decoded body of a 2xx. Raises DaemonError for other statuses.

    ``url``: the address of a daemon that may be asked where its token is, or empty.
    """
    try:
        return decode_response(status, body)
    except DaemonError as error:
        reason = (
            str(error)
            or f"the server responded with status {status} and no reason; if it isn't your daemon, correct --url or "
            "GPUMOND_URL"
        )
        if status == UNAUTHORIZED:
            source = endpoint.token_source
            refused = f"{reason} (it is from {source}); set GPUMOND_TOKEN to a valid one"
            reason = _token_directory_hint(url, source) or (refused if source else NO_TOKEN_TEXT)
        raise DaemonError(reason, status, error.problem) from None


def _token_directory_hint(url: str, token_source: str) -> str:
    """Return where this user can read the token of the daemon at ``url``, or an empty text.

    ``token_source``: where the refused token is from. The default directory may have that of another daemon.
    """
    if url and is_local(url) and token_source != "$GPUMOND_TOKEN":
        with suppress(GpumondError, OSError):
            directory = _send_request("GET", url, "/api/v1/status", READ_SECONDS, False)["runtime_dir"]
            file = Path(directory or "", TOKEN_FILE)
            if directory is not None and str(file) != token_source and file.stat().st_uid in (0, os.geteuid()):
                read_secret(file)
                quoted = shlex.quote(directory)
                return f"the daemon requires its own token, which is in {quoted}; set GPUMOND_RUNTIME_DIR={quoted}"
    return ""


def _endpoint(url: str, timeout_seconds: float, with_token: bool) -> Endpoint:
    """Return the way to the daemon. Raises HttpError if it carries a token to somebody whom it must not reach."""
    if not url.startswith(("http://", "https://", "unix:///")):
        raise HttpError("address", "expected an http:// or https:// address, or unix:///DIRECTORY/api.sock")
    token, source = _token_and_source(url) if with_token else ("", "")
    if url.startswith("unix://"):
        return Endpoint(_socket_connection(Path(url.removeprefix("unix://")), timeout_seconds), "", token, source)
    parts, environ_token = http.split_address(url), os.environ.get("GPUMOND_TOKEN")
    if parts.scheme == "http" and is_local(url) and (url.rstrip("/") == DEFAULT_URL or (with_token and not token)):
        for directory in runtime_directories():
            connection = _socket_connection(directory / "api.sock", timeout_seconds)
            try:
                connection.connect()
            except (OSError, HttpError):
                connection.close()
                continue
            return Endpoint(connection, "", token if environ_token else "", source if environ_token else "")
    connection = connection_to(
        parts,
        lambda: tls_context(os.environ.get("GPUMOND_CA_FILE") or None),
        timeout_seconds,
        _token_recipient_uids() if token else None,
    )
    return Endpoint(connection, parts.path.rstrip("/"), token, source)


def _socket_connection(path: Path, timeout_seconds: float) -> Connection:
    trusted = trusted_uids(str(path.parent))
    return Connection("localhost", socket_path=str(path), timeout_seconds=timeout_seconds, trusted_uids=trusted)


def _token_recipient_uids() -> frozenset[int]:
    """Return the users whose listener may receive a token: those of the runtime directories, root, and this one."""
    return trusted_uids().union(*(trusted_uids(str(directory)) for directory in runtime_directories()))


def _token_and_source(url: str) -> tuple[str, str]:
    """Return $GPUMOND_TOKEN, else, for a daemon on this machine, the first readable token file's content, and its
    source.

    Both are empty without a token. Raises ConfigError for a token with a space or a control character.
    """
    if token := os.environ.get("GPUMOND_TOKEN", "").strip():
        return check_token(token, "$GPUMOND_TOKEN"), "$GPUMOND_TOKEN"
    if urlsplit(url).hostname not in LOCAL_HOSTS:
        return "", ""
    for directory in runtime_directories():
        file = directory / "token"
        try:
            token = read_secret(file)
        except ConfigError:
            continue
        return check_token(token, str(file)), str(file)
    return "", ""
