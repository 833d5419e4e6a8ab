"""Messages for chat services: their formats and limits, and text that would be markup or mention users."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings, strategies

from gpumond.config.loading import load_settings
from gpumond.facts.errors import ConfigError
from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers.webhook import (
    MAX_LINK_CHARACTERS,
    TEMPLATE_BATCH_LIMIT,
    Template,
    Webhook,
    message_body,
    truncate,
)
from tests.helpers.alert_listener import Listener, answer

LINK = "https://node7.example.org:9917/"
RUNBOOK = f"https://node7.example.org/{'x' * (MAX_LINK_CHARACTERS - 26)}"
LEAK = Alert(
    rule="leak",
    phase="firing",
    labels=(
        ("alertname", "leak"),
        ("gpu", "0"),
        ("pid", "42"),
        ("severity", "critical"),
        ("user", ""),
        ("workload", "train"),
    ),
    annotations=(("summary", "train is leaking 32 MiB/min"), ("action", "flushed train")),
    value=0.9,
    active_at=1000.0,
    fired_at=1060.0,
)
HOSTILE = "<!channel> <@U1> @everyone **b** [x](http://e) `c` & \u202e\x1b[31m\n# h ~s~ <at>A</at> :smile:"
ATTACK = replace(LEAK, labels=(*LEAK.labels, ("note", HOSTILE)), annotations=(("summary", HOSTILE),))


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def sent(listener: Listener, template: str, raised: tuple[Alert, ...], resolved: tuple[Alert, ...] = ()) -> Any:
    receiver = Webhook(name="chat", url=listener.url, template=template, page_url=LINK)
    asyncio.run(receiver.send(raised, resolved))
    return listener.requests[-1].json


def test_slack_message_has_plain_text_blocks_and_a_link(listener: Listener):
    message = sent(listener, "slack", (LEAK,))
    header, section, context, link = message["blocks"]
    assert header == {"type": "header", "text": {"type": "plain_text", "text": "leak fires", "emoji": False}}
    assert section["text"]["text"] == "train is leaking 32 MiB/min\nflushed train"
    facts, runbook = context["elements"]
    assert facts["text"] == "severity: critical   workload: train   gpu: 0   pid: 42"
    assert runbook["text"] == f"<{LINK}docs/runbooks/leak|Runbook>"
    assert link["text"]["text"].startswith(f"<{LINK}|gpumond on ")
    assert message["text"].startswith("leak fires on ")


def test_slack_text_of_users_is_never_markup(listener: Listener):
    message = sent(listener, "slack", (replace(ATTACK, rule="<!here>"),))
    *texts, link = message["blocks"]
    assert {each["type"] for block in texts for each in block.get("elements", [block.get("text")])} == {"plain_text"}
    assert message["text"].startswith("&lt;!here&gt; fires")
    assert link["text"]["text"].count("<") == 1


def test_teams_message_is_an_adaptive_card_without_markup(listener: Listener):
    message = sent(listener, "teams", (replace(ATTACK, rule="own"),), (LEAK,))
    (attachment,) = message["attachments"]
    assert (message["type"], attachment["contentType"]) == ("message", "application/vnd.microsoft.card.adaptive")
    card = attachment["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}
    assert {run["type"] for block in card["body"] for run in block["inlines"]} == {"TextRun"}
    assert "entities" not in card["msteams"]
    links = {"Open gpumond": LINK, "Runbook: leak": f"{LINK}docs/runbooks/leak"}
    assert card["actions"] == [{"type": "Action.OpenUrl", "title": title, "url": url} for title, url in links.items()]
    assert "1 firing, 1 resolved" in card["body"][0]["inlines"][0]["text"]


def test_discord_message_mentions_no_user_and_escapes_markdown(listener: Listener):
    message = sent(listener, "discord", (ATTACK,), (LEAK,))
    assert message["allowed_mentions"] == {"parse": []}
    attack, resolved = message["embeds"]
    assert attack["description"].startswith(r"\<!channel\> \<\@U1\> \@everyone \*\*b\*\* \[x\]\(http\://e\) \`c\` & ")
    assert (attack["url"], attack["color"]) == (LINK, 0xB3241B)
    assert attack["fields"][0] == {"name": "severity", "value": "critical", "inline": True}
    assert resolved["title"].startswith("leak resolved on ")
    assert resolved["description"].endswith(f" [Runbook](<{LINK}docs/runbooks/leak>)")


def test_generic_message_has_title_text_fields_and_link(listener: Listener):
    message = sent(listener, "json", (LEAK,))
    assert message.keys() == {"title", "text", "fields", "link", "alerts"}
    assert message["title"].startswith("leak fires on ")
    assert message["text"] == "leak fires: train is leaking 32 MiB/min\nflushed train"
    assert {"name": "workload", "value": "train"} in message["fields"]
    assert message["link"] == LINK
    (alert,) = message["alerts"]
    assert (alert["status"], alert["runbook"]) == ("firing", f"{LINK}docs/runbooks/leak")


@pytest.mark.parametrize("address", ["javascript:alert(1)", "https://h/> <!channel>", f"https://h/{'x' * 400}"])
@pytest.mark.parametrize("template", get_args(Template))
def test_runbook_of_a_rule_is_a_link_only_if_it_is_a_web_address(listener: Listener, template: str, address: str):
    own = replace(LEAK, annotations=(("summary", "grows"), ("runbook_url", address)))
    assert "unbook" not in json.dumps(sent(listener, template, (own,))).replace('"runbook": null', "")


@pytest.mark.parametrize("template", get_args(Template))
def test_control_characters_reach_no_service(listener: Listener, template: str):
    text = json.dumps(sent(listener, template, (ATTACK,)), ensure_ascii=False)
    assert [each for each in ("\u202e", "\\u001b", "\\n") if each in text] == []


def units(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


LONG = strategies.sampled_from(["\\" * 9000, "\U0001f600" * 5000])
TEXTS = strategies.text(max_size=40).map(lambda text: text * 200) | LONG
ALERTS = strategies.builds(
    lambda rule, name, value, summary: replace(
        LEAK,
        rule=rule[:64] or "r",
        labels=(*LEAK.labels, (name[:300] or "n", value)),
        annotations=(("summary", summary), ("runbook_url", RUNBOOK)),
    ),
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
)


@settings(max_examples=30)
@given(strategies.lists(ALERTS, min_size=1, max_size=TEMPLATE_BATCH_LIMIT))
def test_messages_stay_within_the_limits_of_the_services(alerts: list[Alert]):
    host = "h" * 64
    slack = message_body("slack", alerts, (), host, LINK)
    texts = [
        each["text"]
        for block in slack["blocks"]
        for each in ([block["text"]] if "text" in block else block["elements"])
    ]
    assert len(slack["blocks"]) <= 50
    assert all(0 < units(text) <= 3000 for text in texts)
    assert all(units(block["text"]["text"]) <= 150 for block in slack["blocks"] if block["type"] == "header")
    assert sum(map(units, texts)) <= 13_000
    assert len(json.dumps(message_body("teams", alerts, (), host, LINK))) <= 28 * 1024
    embeds = message_body("discord", alerts, (), host, LINK)["embeds"]
    assert len(embeds) <= 10
    assert all(units(embed["title"]) <= 256 and units(embed["description"]) <= 4096 for embed in embeds)
    fields = [field for embed in embeds for field in embed["fields"]]
    assert all(0 < units(field["name"]) <= 256 and 0 < units(field["value"]) <= 1024 for field in fields)
    total = [units(embed["title"]) + units(embed["description"]) for embed in embeds]
    assert sum(total) + sum(units(field["name"]) + units(field["value"]) for field in fields) <= 6000


@pytest.mark.parametrize(
    ("text", "short"), [("abcd", "abcd"), ("abcde", "abc…"), ("a&&", "a…"), ("a&b", "a…"), ("&", "…")]
)
def test_text_is_cut_between_escapes(text: str, short: str):
    assert truncate(text, 4, lambda each: "&amp;" if each == "&" else each) == short


def test_message_contains_at_most_as_many_alerts_as_fit():
    assert Webhook(name="chat", url="http://h", template="slack").batch_limit == TEMPLATE_BATCH_LIMIT
    assert Webhook(name="hook", url="http://h").batch_limit == 64


@pytest.mark.parametrize("status", [200, 202, 204])
def test_answer_of_each_service_is_a_success(listener: Listener, status: int):
    listener.answer = answer(status)
    assert asyncio.run(Webhook(name="chat", url=listener.url, template="teams").send((LEAK,), ())) == status


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ("template: irc", "expected slack, teams, discord or json"),
        ("template: slack, page_url: 'javascript:alert(1)'", "expected an http:// or https:// address"),
        ("template: slack, page_url: 'http://h/> <!channel>'", "expected an http:// or https:// address"),
    ],
)
def test_mistake_in_a_template_is_named(tmp_path: Path, keys: str, complaint: str):
    file = tmp_path / "gpumond.yaml"
    file.write_text(f"receivers: [{{name: chat, type: webhook, url: 'http://secret', {keys}}}]")
    with pytest.raises(ConfigError) as wrong:
        load_settings(file, environ={})
    assert complaint in str(wrong.value)
    assert "//secret" not in str(wrong.value)
