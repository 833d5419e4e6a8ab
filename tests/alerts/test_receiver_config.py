"""Configuration of receivers: mistakes are named, addresses are not shown."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from gpumond.config.loading import load_settings
from gpumond.config.settings import Settings
from gpumond.facts.errors import ConfigError
from gpumond.features.alerts.receivers import RECEIVER_TYPES
from gpumond.features.alerts.receivers.log import Log


def receivers(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "gpumond.yaml"
    file.write_text(text)
    return load_settings(file, environ={})


def test_log_is_the_default_receiver():
    assert load_settings(environ={}).receivers == (Log(name="log"),)


def test_receiver_types_each_have_a_notifier(tmp_path: Path):
    settings = receivers(
        tmp_path,
        "receivers: [{name: l, type: log}, {name: w, type: webhook, url_file: /a, secret_file: /b},"
        " {name: am, type: alertmanager, url: 'https://[::1]:9093/x', ca_file: /c, resend: 30s}]",
    )
    assert len(settings.receivers) == len(RECEIVER_TYPES)
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301  # as the daemon receives them
    assert [(each.name, each.resend_seconds) for each in settings.receivers] == [("l", None), ("w", None), ("am", 30.0)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[{name: w, type: webhook}]", "exactly one of url and url_file"),
        ("[{name: w, type: webhook, url: 'http://secret', url_file: /a}]", "exactly one of url and url_file"),
        ("[{name: w, type: webhook, url: 'file:///secret'}]", "expected an http:// or https:// url"),
        ("[{name: w, type: webhook, url: 'http://me:secret@host'}]", "without user or password"),
        ("[{name: w, type: webhook, url: ['http://secret']}]", "url"),
        ("[{name: w, type: webhook, urll: 'http://secret'}]", "did you mean url?"),
        (
            "[{name: w, type: webhook, url: 'http://secret', resend: 1m}]",
            "not a key of type webhook; expected one of name, url, ",
        ),
        (
            "[{name: am, type: alertmanager, url: 'http://secret', secret_file: /a}]",
            "not a key of type alertmanager; expected one of name, url, ",
        ),
        ("[{name: l, type: log, url: 'http://secret'}]", "[0].url: not a key of type log; expected one of name, type"),
        ("[{name: l, type: log}, {name: l, type: log}]", "the name 'l' is used twice"),
        ("[{name: l, type: mail}]", "type"),
    ],
)
def test_mistake_is_named_without_the_address(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(ConfigError) as wrong:
        receivers(tmp_path, f"receivers: {text}")
    assert complaint in str(wrong.value)
    assert "secret'" not in str(wrong.value)
    assert "//secret" not in str(wrong.value)


def test_rule_cannot_name_an_unknown_receiver(tmp_path: Path):
    rule = "{name: r, scope: device, value: up, below: 1, receivers: [nobody]}"
    with pytest.raises(ConfigError, match="unknown receiver 'nobody'"):
        receivers(tmp_path, f"rules: [{rule}]")
