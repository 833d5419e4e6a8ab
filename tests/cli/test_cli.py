"""Command line: help, exit codes, and one line with the remedy."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from gpumond.cli.arguments import parse_address
from gpumond.cli.client import DEFAULT_URL
from gpumond.commands.main import commands, main, make_parser, with_options_last
from gpumond.commands.serve import add_arguments, choose_source, option_values
from gpumond.config.loading import load_settings
from gpumond.facts.errors import ConfigError, SourceUnavailable
from tests.helpers import forks
from tests.helpers.frames import busy_frame, fake_daemon
from tests.helpers.running import RunningDaemon, free_port, gpumond, gpumond_here
from tests.helpers.screens import terminal
from tests.helpers.trees import SysTree


@pytest.mark.parametrize("command", commands())
def test_commands_have_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_overview_shows_each_command_once():
    shown = gpumond_here()
    assert (shown.returncode, shown.stderr) == (2, "")
    assert shown.stdout == gpumond_here("--help").stdout
    listed = [line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(commands())


@pytest.mark.parametrize(
    ("name", "example"), [(each.name, line) for each in commands().values() for line in each.examples]
)
def test_examples_are_valid(name: str, example: str):
    parser, _ = make_parser([name])
    command = (
        next(part for part in example.split(" | ") if f"gpumond {name}" in part).partition("gpumond ")[2].rstrip(")")
    )
    assert parser.parse_args(shlex.split(command)).command_name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stats",), "unknown command 'stats'; did you mean gpumond status?"),
        (("export",), "unknown command 'export'; did you mean gpumond record?"),
        (("silence", "delete", "--all"), "gpumond silence delete: unknown option '--all'"),
        (("flush", "--devcie", "0"), "unknown option '--devcie'; did you mean --device?"),
        (("run", "--device", "0", "--", "true"), "unknown option '--device'; did you mean --need-device?"),
        (("queue", "train"), "gpumond queue: unknown argument 'train'"),
        (("--device", "0"), "gpumond: unknown option '--device'"),
        (("--verison",), "gpumond: unknown option '--verison'; did you mean --version?"),
        (("flush", "--all", "train"), "gpumond flush: --all can't be combined with NAME"),
        (("audit", "--log", "x"), "--log requires verify, as in `gpumond audit verify --log FILE`"),
        (("baseline", "compare", "x", "--fail-above", "x"), "--fail-above 'x': expected a percentage such as 5%"),
        (("why", "train", "--record", "0s"), "--record '0s': must be above 0"),
        (("why", "train", "--folded", "x"), "gpumond: --folded requires --record"),
        (
            ("rules",),
            "a subcommand is required: check, test, list, override, restore or test-receiver, as in "
            "`gpumond rules check rules.yaml`",
        ),
        (("baseline", "record", "x", "--workloads=a"), "unknown option '--workloads=a'; did you mean --workload?"),
        (("status", "--zzz"), "unknown option '--zzz'"),
        (("status", "--gpu"), "unknown option '--gpu'"),
        (
            ("baseline",),
            "a subcommand is required: record, compare, list or delete, as in `gpumond baseline record before "
            "--workload train --for 10m`",
        ),
        (("limit",), "SIZE|none is required, as in `gpumond limit --pid 4242 40GiB`"),
        (
            ("silence", "add"),
            "MATCHER, --for and --reason are required, as in `gpumond silence add rule=leak 'workload=~train.*' --for "
            "1h --reason 'a known leak'`",
        ),
        (
            ("silence", "add", "rule=leak", "--reason", "x", "--for", "1"),
            "--for '1': expected a unit, as in 1s, 1m or 1h",
        ),
        (("serve", "--interval", "0.5"), "--interval '0.5': expected a unit, as in 0.5s, 0.5m or 0.5h"),
        (("fleet", "wakeup"), "unknown subcommand 'wakeup'; did you mean gpumond fleet wake?"),
        (("flush", "--pid", "x"), "--pid 'x': must be a whole number above 0"),
        (("flush", "0"), "NAME '0': a pid is above 0"),
        (("flush", "--timeout", "--all"), "--timeout: expected a value"),
        (("limit", "train", "0"), "SIZE '0': the size must be above 0"),
        (("limit", "train", "99999999999TiB"), "SIZE '99999999999TiB': expected a smaller number"),
        (("record", "--for", "0s"), "--for '0s': must be above 0"),
        (("fleet", "status", "--prometheus", "n"), "--prometheus 'n': expected an http:// or https:// address"),
        (("completion", "tcsh"), "gpumond completion: 'tcsh': expected one of bash, zsh, fish"),
        (("flush", "--step", "cahce"), "--step 'cahce' is unknown; did you mean cache?"),
        (("oom", "4242"), "gpumond oom: '4242': expected list or show; did you mean gpumond oom show --pid 4242?"),
        (
            ("oom", "179-42-1"),
            "gpumond oom: '179-42-1': expected list or show; did you mean gpumond oom show 179-42-1?",
        ),
    ],
)
def test_wrong_word_is_named_with_what_was_expected(arguments: tuple[str, ...], message: str):
    refused = gpumond_here(*arguments)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert (line if message.endswith("?") else line.partition("; ")[0]).endswith(message)


@pytest.mark.parametrize(
    ("words", "example"),
    [
        ("quota set x 3", "'set'; see `gpumond quota --help`"),
        ("check-config --config F", "an example: `gpumond check-config /etc/gpumond/gpumond.yaml`; see"),
        ("flush", "is required, as in `gpumond flush "),
    ],
)
def test_wrong_use_gets_an_example(words: str, example: str):
    assert example in gpumond_here(*words.split()).stderr


@pytest.mark.parametrize(
    "words",
    [
        "oom show last --url http://node1:9917 --json",
        "audit verify --limit 5 --json",
        "rules override gpu-full --threshold 90% --for 1m",
        "silence add workload=train uid=1000 --for 2h --reason=test",
        "baseline compare nightly --fail-above 5% --json",
        "fleet status --kubernetes gpumond --parallel 4 --json",
        "fleet undo op-1 --targets targets.json --yes",
        "limit train 40GiB --device 0 --json",
        "loadgen leak --device 0 --backend sim",
        "completion bash --url http://node1:9917",
    ],
)
def test_options_are_accepted_on_either_side_of_each_argument(words: str):
    command, *given = words.split()
    parser, parsers = make_parser([command])
    expected = parser.parse_args([command, *given])
    arguments = list(takewhile(lambda word: not word.startswith("--"), given))
    options = given[len(arguments) :]
    for position in range(len(arguments) + 1):
        mixed = [*arguments[:position], *options, *arguments[position:]]
        assert parser.parse_args([command, *with_options_last(parsers[command], mixed)]) == expected


INTERRUPT = "import os, signal\ndef interrupt(*_): os.kill(os.getpid(), signal.SIGINT)\n"
NAMED = 'class Named:\n    name = type("Name", (), {"__set_name__": interrupt})()\n'
"""Python 3.11 makes a RuntimeError of an exception here."""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["interrupt()", NAMED], ids=["module", "class"])
def test_ctrl_c_while_python_imports_ends_without_a_traceback(place: str, tmp_path: Path):
    (tmp_path / "difflib.py").write_text(INTERRUPT + place)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    command = (sys.executable, "-m", "gpumond", "status")
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_options_of_another_command_are_not_checked():
    assert gpumond("run", "--", sys.executable, "-c", "", "--unknown").returncode == 0


@pytest.mark.parametrize("arguments", [(), ("xyzzy",), ("flush",), ("flush", "--pid", "x"), ("serve", "--zzz", "x")])
def test_wrong_use_exits_with_2(arguments: tuple[str, ...]):
    refused = gpumond_here(*arguments)
    assert refused.returncode == 2
    if arguments:
        (line,) = refused.stderr.splitlines()
        own = (
            "to list the commands: gpumond --help"
            if arguments[0] == "xyzzy"
            else f"see `gpumond {arguments[0]} --help`"
        )
        assert line.endswith(own)


def test_id_that_is_none_is_refused_with_the_command_that_lists_ids():
    for id in ("newest", "123"):
        refused = gpumond_here("oom", "show", id)
        message = f"gpumond: {id!r} isn't a case's ID; to list the cases: gpumond oom\n"
        assert (refused.returncode, refused.stderr) == (2, message)


def test_output_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "gpumond", "help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_without_room_is_an_error_and_closed_output_is_none():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "gpumond", "help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "gpumond: the output can't be written: No space left on device\n")
    with fake_daemon(busy_frame()) as fake:
        words = [sys.executable, "-m", "gpumond", "status", "--url", fake.url]
        done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_invalid_configuration_exits_with_2_and_names_the_place(tmp_path: Path):
    file = tmp_path / "gpumond.yaml"
    file.write_text("interval: soon\n")
    for command in (("serve", "--config"), ("check-config",)):
        refused = gpumond(*command, str(file))
        assert refused.returncode == 2
        assert f"{file}, line 1: interval: 'soon'" in refused.stderr


def test_valid_configuration_exits_with_0(tmp_path: Path):
    file = tmp_path / "gpumond.yaml"
    file.write_text("interval: 2s\n")
    assert gpumond_here("check-config", str(file)).returncode == 0


def one_line(refused: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in refused.stderr.splitlines() if line.startswith("gpumond: ")]
    assert len(lines) == 1, refused.stderr
    assert "Traceback" not in refused.stderr
    return lines[0]


def test_port_in_use_ends_the_demo_in_one_line_with_the_remedy():
    """`gpumond serve` serves agents and rules without the port (tests/daemon/test_lost_places.py)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = gpumond("demo", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert refused.returncode == 2
    assert "--listen" in one_line(refused)


def test_invalid_socket_path_is_one_line_with_the_remedy(tmp_path: Path):
    tmp_path.chmod(0o777)
    refused = gpumond("serve", "--source", "sim", "--listen", f"127.0.0.1:{free_port()}", "--socket", f"{tmp_path}/s")
    assert refused.returncode == 2
    assert "--socket" in one_line(refused)


def test_missing_driver_is_one_line_that_names_the_demo():
    refused = gpumond("serve")
    if "no GPU driver" not in refused.stderr:
        pytest.skip("this machine has a GPU driver")
    assert refused.returncode == 1
    assert "gpumond demo" in one_line(refused)


@pytest.mark.parametrize("command", [("status",), ("flush", "--all")])
def test_missing_daemon_is_one_line_with_the_remedy(command: tuple[str, ...]):
    refused = gpumond_here(*command, GPUMOND_URL=f"http://127.0.0.1:{free_port()}")
    assert refused.returncode == 1
    assert "gpumond serve" in one_line(refused)


WORDS = {
    "rules": [f"rules {word}" for word in ("check", "test", "list", "override", "restore", "test-receiver")],
    "silence": [f"silence {word}" for word in ("add", "list", "delete")],
    "baseline": [f"baseline {word}" for word in ("record", "compare", "list")],
    "fleet": [
        f"fleet {word}"
        for word in (
            "targets",
            "status",
            "top",
            "doctor",
            "audit",
            "flush",
            "sleep",
            "wake",
            "undo",
            "report",
            "advise",
        )
    ],
}


@pytest.mark.parametrize("words", [words for name in commands() for words in (name, *WORDS.get(name, ()))])
def test_options_cannot_be_abbreviated(words: str, capsys: pytest.CaptureFixture[str]):
    """``--hel`` would abbreviate ``--help``, which exits with 0."""
    with pytest.raises(SystemExit) as wrong:
        main([*words.split(), "--hel"])
    assert wrong.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:9917", "http://127.0.0.1:9917"),
        (":9918", "http://127.0.0.1:9918"),
        ("[::1]:9917", "http://[::1]:9917"),
        ("https://gpu", "https://gpu"),
        ("unix:///run/gpumond-api/api.sock", "unix:///run/gpumond-api/api.sock"),
    ],
)
def test_address_may_have_no_scheme(text: str, url: str):
    assert parse_address(text) == url


@pytest.mark.parametrize(
    "text", ["ftp://gpu", "gpu:port", "gpu:99999", "gpu:0", "http://", "http://[::1", "unix://api"]
)
def test_invalid_address_is_named(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="expected HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("command", [("status",), ("run", "--need", "1GiB")])
def test_address_with_another_scheme_is_wrong_use(command: tuple[str, ...]):
    refused = gpumond_here(*command, "--url", "ftp://gpu", *(("true",) if "run" in command else ()))
    assert refused.returncode == 2
    assert "expected HOST:PORT, an http:// or https:// address" in refused.stderr


def test_help_describes_every_command_and_argument():
    def undescribed(parser: argparse.ArgumentParser) -> Iterator[str]:
        if not parser.description:
            yield parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for own in action.choices.values():
                    yield from undescribed(own)
            elif not action.help:
                yield f"{parser.prog} {action.dest}"

    _, parsers = make_parser(commands())
    assert [name for parser in parsers.values() for name in undescribed(parser)] == []


def test_help_fits_100_columns_and_breaks_no_option(monkeypatch: pytest.MonkeyPatch):
    def texts(parser: argparse.ArgumentParser) -> Iterator[str]:
        yield parser.format_help()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for own in action.choices.values():
                    yield from texts(own)

    monkeypatch.setenv("COLUMNS", "100")
    _, parsers = make_parser(commands())
    lines = [line for parser in parsers.values() for text in texts(parser) for line in text.splitlines()]
    assert [line for line in lines if len(line) > 100 or line.endswith("-") or "{a" in line] == []


def test_top_refuses_a_dumb_terminal():
    environ = {**os.environ, "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "gpumond", "top"], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpumond: this terminal isn't supported (TERM=dumb); run gpumond top --once\n"


@pytest.mark.parametrize("name", ["nvml", "drm", "sim"])
def test_named_source_is_used(name: str):
    assert choose_source(name) == name


def test_flags_of_prometheus_exporters_are_accepted(tmp_path: Path):
    web = tmp_path / "web.yml"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    given = ["--web.listen-address", ":9400", "--web.config.file", str(web), "--log.level", "debug"]
    settings = load_settings(None, option_values(parser.parse_args(given)), environ={})
    assert (settings.listen, settings.web_config, settings.log_level) == ("0.0.0.0:9400", web, "debug")


def test_unknown_log_level_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="expected debug, info, warning or error"):
        load_settings(None, {"log_level": "verbose"}, environ={})


def test_devices_of_all_vendors_are_served(tmp_path: Path):
    tree = SysTree(tmp_path / "sys")
    tree.amdgpu()
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert choose_source("auto", str(tree.root)) == "drm"
        with pytest.raises(SourceUnavailable, match="gpumond demo"):
            choose_source("auto", str(tmp_path))
    else:
        assert choose_source("auto", str(tree.root)) == "all"
        assert choose_source("auto", str(tmp_path)) == "nvml"


def run(daemon: RunningDaemon, *options: str) -> subprocess.CompletedProcess[str]:
    environ = daemon.environ | {"GPUMOND_RUNTIME_DIR": str(daemon.directory)}
    command = [sys.executable, "-m", "gpumond", "open", *options]
    return forks.run(command, env=environ)


@pytest.mark.parametrize("by", ["address", "runtime directory"])
def test_printed_address_signs_in_once(tmp_path: Path, by: str):
    with RunningDaemon(tmp_path, "--source", "nvml") as daemon:
        done = run(daemon, "--print", "--url", daemon.url if by == "address" else DEFAULT_URL)
        assert done.returncode == 0, done.stderr
        (address,), (hint,) = done.stdout.splitlines(), done.stderr.splitlines()
        assert address.startswith(f"{daemon.url}/#code=gpm_")
        assert hint == "open the address within 1 min; it signs one browser in"
        body = json.dumps({"code": address.partition("#code=")[2]}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{daemon.url}/api/v1/sessions", body, headers), timeout=60) as answer:
            assert json.load(answer)["token"].startswith("gpm_")


@pytest.mark.parametrize("stale", [False, True], ids=["no token", "a token of another daemon"])
def test_error_names_the_directory_of_a_readable_token(tmp_path: Path, stale: bool):
    with RunningDaemon(tmp_path / "daemon", "--source", "nvml") as daemon:
        other = tmp_path / "other"
        other.mkdir()
        if stale:
            (other / "token").touch(0o600)
            (other / "token").write_text("gpm_of_another_daemon")
        command = [sys.executable, "-m", "gpumond", "flush", "--all", "--url", daemon.url]
        environ = {name: value for name, value in daemon.environ.items() if not name.startswith("GPUMOND_")}
        environ["GPUMOND_RUNTIME_DIR"] = str(other)
        done = forks.run(command, env=environ)
        directory = daemon.get("status")["runtime_dir"]
        assert directory == str(daemon.directory)
        assert done.stderr == (
            f"gpumond: the daemon requires its own token, which is in {directory}; set "
            f"GPUMOND_RUNTIME_DIR={directory}\n"
        )


def test_address_of_a_socket_is_refused(tmp_path: Path):
    command = [sys.executable, "-m", "gpumond", "open", "--url", "unix:///run/gpumond-api"]
    done = forks.run(command)
    assert done.returncode == 2
    assert "a browser needs an http:// or https:// address" in done.stderr


def test_open_without_a_daemon_says_that_nothing_listens():
    command = [sys.executable, "-m", "gpumond", "open", "--print", "--url", "http://127.0.0.1:1"]
    done = forks.run(command)
    assert (done.returncode, done.stdout) == (1, "")
    reason = "no daemon is reachable at http://127.0.0.1:1 (nothing is listening at this address)"
    assert done.stderr.startswith(f"gpumond: {reason}; start one with `gpumond serve`")


def test_an_address_that_cannot_be_reached_is_named_with_its_variable():
    command = [sys.executable, "-m", "gpumond", "status"]
    done = forks.run(command, env=os.environ | {"GPUMOND_URL": "nowhere.invalid"})
    assert (done.returncode, done.stdout) == (1, "")
    shown = done.stderr.strip()
    assert shown.startswith(
        "gpumond: no daemon is reachable at http://nowhere.invalid, which is from $GPUMOND_URL (the "
    )
    assert shown.endswith("); correct the variable")
    done = forks.run([*command, "--url", "nowhere.invalid"])
    assert done.stderr.strip().endswith("); correct --url")
    done = forks.run(command, env=os.environ | {"GPUMOND_URL": "127.0.0.1:1"})
    assert done.stderr.strip().endswith("; start one with `gpumond serve`, or correct the variable")


def test_a_directory_of_the_environment_without_a_socket_is_named(tmp_path: Path):
    command = [sys.executable, "-m", "gpumond", "status"]
    done = forks.run(command, env=os.environ | {"GPUMOND_RUNTIME_DIR": str(tmp_path), "GPUMOND_URL": ""})
    if done.returncode == 0:
        pytest.skip("a daemon listens at the default address")
    assert (done.returncode, done.stdout) == (1, "")
    assert f", and none listens at {tmp_path}/api.sock (in $GPUMOND_RUNTIME_DIR); start one" in done.stderr


@pytest.mark.parametrize("listens", [False, True])
def test_run_says_on_a_terminal_that_no_daemon_listens(tmp_path: Path, listens: bool):
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        if listens:
            server.listen()
        command = [sys.executable, "-m", "gpumond", "run", "--", "echo", "done"]
        with terminal(command, (200, 9), GPUMOND_SOCKET=os.fspath(path)) as session:
            assert session.ends() == 0
        redirected = forks.run(command, env=os.environ | {"GPUMOND_SOCKET": os.fspath(path)})
    line = f"gpumond: no daemon is listening at {path}; your program runs unobserved until you start gpumond serve"
    assert session.written.splitlines() == ([] if listens else [line]) + ["done"]
    assert (redirected.stdout, redirected.stderr) == ("done\n", "")


def test_run_tells_the_program_what_it_allows():
    done = gpumond("run", "--allow-limit", "--suspendable", "--", "env")
    allowed = {line for line in done.stdout.splitlines() if line.startswith("GPUMOND_") and line.endswith("=1")}
    assert allowed == {"GPUMOND_AGENT=1", "GPUMOND_ALLOW_LIMIT=1", "GPUMOND_SUSPENDABLE=1"}


def test_own_files_are_read_in_any_locale():
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "import gpumond.page.files, gpumond.page.runbooks; print(ascii(gpumond.page.runbooks.SECTIONS))"
    done = forks.run([sys.executable, "-c", code], env=os.environ | environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2026" in done.stdout
