"""Messages about wrong values contain no words of the libraries that found them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumond.config.loading import load
from gpumond.facts.errors import ConfigError

CASES = {
    "retention: 3h": "retention: '3h': must be at least 1d",
    "interval: 2h": "interval: '2h': must be at most 1m",
    "interval: 10ms": "interval: '10ms': must be at least 100ms",
    "interval: 0": "interval: 0: must be at least 0.1",
    "listen: {a: 1}": "listen: must be text",
    "insecure: maybe": "insecure: 'maybe': must be true or false",
    "log_level: loud": "log_level: 'loud': must be debug, info, warning or error",
    "token_review_audience: a b": "token_review_audience: 'a b': use 1 to 256 ASCII characters without spaces",
    "socket_mode: '9'": "socket_mode: '9': must have the form 0?[0-7]{3}",
    "rules: [{name: X y, scope: device, value: used_ratio, above: 1}]": (
        "rules[0].name: 'X y': use 1 to 64 characters of a-z, 0-9, _ and -"
    ),
    "rules: [{name: a}]": "rules[0].scope: missing",
}


@pytest.mark.parametrize("text", CASES)
def test_wrong_value_is_shown_with_what_is_expected(tmp_path: Path, text: str):
    file = tmp_path / "gpumond.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    assert str(caught.value).splitlines()[0] == f"{file}: {CASES[text]}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("listen: [\n", "line 2: invalid YAML: unclosed [ or {"),
        ('listen: "a\n', "line 1: invalid YAML: unclosed quote"),
        ("a: b: c\n", "line 1: invalid YAML: unexpected key; check the indentation, and quote texts that contain ': '"),
        ("a:\n\t- b\n", "line 2: invalid YAML: a tab; indent with spaces"),
    ],
)
def test_text_that_is_not_yaml_has_line_and_problem(tmp_path: Path, text: str, problem: str):
    file = tmp_path / "gpumond.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
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
        load(None, flags, environ)
