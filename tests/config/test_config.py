from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpumond.config.loading import load_settings
from gpumond.config.settings import Settings, SettingsConfig
from gpumond.facts.errors import ConfigError
from gpumond.features.rules.built_in import BUILT_IN


def written(directory: Path, text: str) -> Path:
    file = directory / "gpumond.yaml"
    file.write_text(text)
    return file


def test_flags_take_precedence_over_environment_file_and_defaults(tmp_path: Path):
    file = written(tmp_path, "listen: 127.0.0.1:1\nsource: sim\ninterval: 2s\n")
    settings = load_settings(file, {"listen": "127.0.0.1:3", "source": None}, {"GPUMOND_LISTEN": "127.0.0.1:2"})
    assert (settings.listen, settings.source, settings.interval, settings.flush_cooldown) == (
        "127.0.0.1:3",
        "sim",
        2.0,
        30.0,
    )


@pytest.mark.parametrize(
    ("flags", "environ", "place"),
    [
        ({}, {}, "/agents"),
        ({}, {"GPUMOND_RUNTIME_DIR": "/own"}, "/own"),
        ({"runtime_dir": "/given"}, {"GPUMOND_RUNTIME_DIR": "/own"}, "/given"),
    ],
)
def test_runtime_directory_defaults_to_the_agent_sockets(flags: dict[str, str], environ: dict[str, str], place: str):
    settings = load_settings(None, {"socket": "/agents/agent.sock", **flags}, environ)
    assert settings.runtime_directory() == Path(place)
    assert settings.agent_socket() == Path("/agents/agent.sock")


def test_two_runtime_directories_have_two_agent_sockets():
    own = [load_settings(None, {}, {"GPUMOND_RUNTIME_DIR": place}) for place in ("/one", "/two")]
    assert [str(settings.agent_socket()) for settings in own] == ["/one/agent.sock", "/two/agent.sock"]


def test_own_rule_replaces_the_built_in_one_of_its_name(tmp_path: Path):
    file = written(
        tmp_path,
        """
disabled_rules: [orphan-memory]
rules:
  - {name: device-nearly-full, scope: device, value: used_ratio, above: 95%, clear: 90%, for: 5m}
  - {name: hog, scope: process, value: used_bytes, above: 40GiB, match: {pid: "1*"}}
""",
    )
    rules = {rule.name: rule for rule in load_settings(file, environ={}).active_rules()}
    assert (rules["device-nearly-full"].above, rules["device-nearly-full"].for_seconds) == (0.95, 300)
    assert rules["hog"].above == 40 * 1024**3
    assert rules.keys() == {rule.name for rule in BUILT_IN} - {"orphan-memory"} | {"hog"}


def test_reclaim_is_off_with_and_without_quotes(tmp_path: Path):
    for text in ("reclaim: off", 'reclaim: "off"'):
        file = tmp_path / "gpumond.yaml"
        file.write_text(text)
        assert load_settings(file, environ={}).reclaim == "off"


def test_overrides_replace_fields_of_built_in_rules(tmp_path: Path):
    file = written(
        tmp_path,
        """
rule_overrides:
  device-nearly-full: {threshold: 90%, for: 5m}
  leak: {severity: critical}
  idle-holder: {enabled: false}
  fragmentation: {enabled: true}
""",
    )
    settings = load_settings(file, environ={})
    rules = {rule.name: rule for rule in settings.active_rules()}
    default = {rule.name: rule for rule in BUILT_IN}
    assert (rules["device-nearly-full"].above, rules["device-nearly-full"].for_seconds) == (0.9, 300)
    assert rules["leak"] == replace(default["leak"], labels=(("severity", "critical"),))
    assert rules["fragmentation"] == default["fragmentation"]
    assert rules.keys() == default.keys() - {"idle-holder"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rule_overrides: {leak: {threshold: 200%}}", ["leak: threshold: 200% is a percentage, but `leak` is 0 or 1"]),
        (
            "rule_overrides: {leak: {threshold: 5}}",
            ["leak: threshold: 5 is out of range: leak is 0 or 1, so the alert"],
        ),
        ("rule_overrides: {device-lost: {threshold: 0}}", ["up is 0 or 1", "set a threshold of more than 0"]),
        ("rule_overrides: {device-nearly-full: {threshold: 95}}", ["from 0 to 1 (100%)", "less than 1, such as 90%"]),
        ("lisen: 127.0.0.1:1", ["lisen", "unknown key", "did you mean listen?"]),
        (
            "receivers: [{name: a, type: slak}]",
            ["receivers[0].type: 'slak': expected one of log, webhook, alertmanager"],
        ),
        ("receivers: [{name: a, url: b}]", ["receivers[0].type: expected one of log, webhook, alertmanager"]),
        ("listen: nowhere", ["listen", "'nowhere'", "HOST:PORT"]),
        ("listen: 0.0.0.0:9917", ["0.0.0.0:9917", "--insecure"]),
        ("source: magic", ["source", "'magic'", "'magic': expected one of auto, nvml"]),
        ("interval: soon", ["interval", "'soon'", "duration"]),
        ("interval: 0", ["interval", "must be at least 0.1"]),
        ("disabled_rules: [nope]", ["disabled_rules", "'nope'", "device-nearly-full"]),
        ("rule_overrides: {nope: {threshold: 1}}", ["rule_overrides", "'nope'", "device-nearly-full"]),
        ("rule_overrides: {leak: {}}", ["rule_overrides.leak", "at least one of threshold, for, severity, enabled"]),
        (
            "rule_overrides: {leak: {threshhold: 1}}",
            ["rule_overrides.leak.threshhold", "unknown key", "did you mean threshold?"],
        ),
        ("rule_overrides: {leak: {for: soon}}", ["rule_overrides.leak.for", "'soon'", "duration"]),
        (
            "{disabled_rules: [leak], rule_overrides: {leak: {threshold: 1}}}",
            ["rule_overrides: leak is also in disabled_rules"],
        ),
        (
            "{rules: [{name: leak, scope: process, value: leak, above: 0}], rule_overrides: {leak: {threshold: 1}}}",
            ["rule_overrides: leak is also in rules"],
        ),
        ("rules: [{name: A B}]", ["rules[0].name", "'A B'"]),
        (
            "rules: [{name: a, scope: device, value: mood, above: 1}]",
            ["rules[0]", "'mood'", "docs/reference/rules.md#values"],
        ),
        ("rules: [{name: a, scope: device, value: used_ratio}]", ["rules[0]", "above", "below"]),
        ("rules: [{name: a, scope: device, value: used_ratio, above: lots}]", ["rules[0].above", "'lots'", "80%"]),
        (
            "rules: [{name: a, scope: device, value: used_ratio, above: 1GiB}]",
            ["rules[0]", "above: 1GiB is a size, but `used_ratio` is a ratio"],
        ),
        (
            "rules: [{name: a, scope: device, value: used_bytes, below: 90%}]",
            ["rules[0]", "below: 90% is a percentage, but `used_bytes` has the unit bytes"],
        ),
        (
            "rules: [{name: a, scope: device, value: used_ratio, above: 0.9, clear: 2}]",
            ["rules[0]", "must not be higher than `above`"],
        ),
        ("rules: [{name: a, scope: device, value: used_ratio, above: 1, fro: 5s}]", ["rules[0].fro", "mean for?"]),
        ("- a list", ["expected keys and values"]),
        ("a: [", ["line 1: invalid YAML"]),
    ],
)
def test_mistake_names_file_key_value_and_what_is_expected(tmp_path: Path, text: str, says: list[str]):
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_settings(file, environ={})
    for part in [str(file), *says]:
        assert part in str(error.value)


def test_empty_variable_is_not_set():
    empty = {f"GPUMOND_{name.upper()}": "" for name in SettingsConfig.model_fields}
    assert load_settings(environ=empty) == load_settings(environ={})


def test_mistake_in_the_environment_names_the_variable():
    with pytest.raises(ConfigError, match="environment variable GPUMOND_INTERVAL 'x': expected"):
        load_settings(environ={"GPUMOND_INTERVAL": "x"})


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file or directory; expected a YAML file such as "):
        load_settings(tmp_path / "absent.yaml", environ={})


def test_defaults_are_those_that_the_schema_describes():
    assert load_settings(environ={}) == Settings()


CASES = {
    "retention: 3h": "retention: '3h': must be at least 1d",
    "interval: 2h": "interval: '2h': must be at most 1m",
    "interval: 10ms": "interval: '10ms': must be at least 100ms",
    "interval: 0": "interval: 0: must be at least 0.1",
    "listen: {a: 1}": "listen: must be text",
    "listen: 9917": "listen: 9917: must be text, in quotes",
    "insecure: maybe": "insecure: 'maybe': must be true or false",
    "log_level: loud": "log_level: 'loud': expected debug, info, warning or error",
    "token_review_audience: a b": "token_review_audience: 'a b': expected 1 to 256 ASCII characters without spaces",
    "socket_mode: '9'": "socket_mode: '9': expected an octal mode in quotes, such as '0660'",
    "socket_mode: 0660": "socket_mode: 432: expected an octal mode in quotes, such as '0660'",
    "reclaim: on": "reclaim: True: expected user, all or off",
    "rules: [{name: X y, scope: device, value: used_ratio, above: 1}]": (
        "rules[0].name: 'X y': expected 1 to 64 characters from a-z, 0-9, _ and -"
    ),
    "rules: [{name: a}]": "rules[0].scope: missing",
}


@pytest.mark.parametrize("text", CASES)
def test_wrong_value_is_shown_with_what_is_expected(tmp_path: Path, text: str):
    file = tmp_path / "gpumond.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, environ={})
    assert str(caught.value).splitlines()[0] == f"{file}, line 1: {CASES[text]}"


def test_wrong_key_and_value_are_found_by_their_lines(tmp_path: Path):
    file = written(tmp_path, "interval: 1s\nrules:\n  - name: a\n    vaule:\n      a: 1\nsource: magic\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, environ={})
    lines = str(caught.value).splitlines()
    assert f"{file}, line 4: rules[0].vaule: unknown key; did you mean value?" in lines
    assert any(each.startswith(f"{file}, line 6: source: 'magic': ") for each in lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("listen: [\n", "line 2: invalid YAML: unclosed [ or {"),
        ('listen: "a\n', "line 1: invalid YAML: unclosed quote"),
        ("a: b: c\n", "line 1: invalid YAML: unexpected key; check the indentation, and quote texts that contain ': '"),
        ("rules: []\nlisten: ':1'\nrules: []\n", "line 3: invalid YAML: the key 'rules' is already on line 1"),
        ("web: {a: 1, a: 2}\n", "line 1: invalid YAML: the key 'a' is already on line 1"),
        ("a:\n\t- b\n", "line 2: invalid YAML: a tab; indent with spaces"),
    ],
)
def test_text_that_is_not_yaml_has_line_and_problem(tmp_path: Path, text: str, problem: str):
    file = tmp_path / "gpumond.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, environ={})
    assert str(caught.value) == f"{file}, {problem}"


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"source": "foo"}, {}, "--source 'foo': expected one of auto,"),
        ({}, {"GPUMOND_INTERVAL": "2h"}, "environment variable GPUMOND_INTERVAL '2h': must be at most 1m"),
    ],
)
def test_wrong_option_is_named_once(flags: dict[str, str], environ: dict[str, str], message: str):
    with pytest.raises(ConfigError, match="^" + message):
        load_settings(None, flags, environ)
