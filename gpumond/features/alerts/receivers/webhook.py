"""Webhook: alerts as JSON, or as a message of a chat service; docs/reference/notifications.md has the schema.

Signed if a secret is configured.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers.base import RUNBOOK_URL, HttpReceiver, is_linkable, post, read_receiver_secret

Template = Literal["slack", "teams", "discord", "json"]

TEMPLATE_BATCH_LIMIT = 5
"""Maximum number of alerts of one message."""
MAX_LINK_CHARACTERS = 320
"""Maximum length of a link to a runbook; a longer address is text."""
MAX_FIELDS = 6
"""Maximum number of labels of an alert that a message shows; the generic document has all of them."""
ELLIPSIS = "…"
COLORS = {"critical": 0xB3241B, "page": 0xB3241B, "warning": 0xE08A00, "info": 0x1857B8}
RESOLVED_COLOR = 0x2E7D32
LABEL_ORDER = ("severity", "workload", "gpu", "pid", "user", "engine", "uuid")
"""Labels that are shown first."""


@dataclass(frozen=True, slots=True)
class Section:
    """One alert of a message: plain text without control characters; ``text`` has a line for each annotation.

    ``runbook`` is an address, or empty.
    """

    rule: str
    title: str
    text: str
    fields: tuple[tuple[str, str], ...]
    color: int
    status: Literal["firing", "resolved"]
    runbook: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """Alerts of one message. ``link`` is the address of the page, empty if it is not configured."""

    title: str
    sections: tuple[Section, ...]
    link: str
    instance: str


def message_body(
    template: Template, raised: Sequence[Alert], resolved: Sequence[Alert], instance: str, link: str
) -> Any:
    """Return the JSON document of a message."""
    sections = (*(_section("firing", each) for each in raised), *(_section("resolved", each) for each in resolved))
    return _WRITERS[template](Message(_title(sections, instance), sections, link, sanitize(instance)))


def sanitize(text: str) -> str:
    """Return the text without line ends, controls, marks that change the direction, and halves of surrogate pairs."""
    return "".join("\ufffd" if unicodedata.category(each) in _REPLACED_CATEGORIES else each for each in text)


_REPLACED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


def _section(status: Literal["firing", "resolved"], alert: Alert) -> Section:
    labels, annotations = dict(alert.labels), dict(alert.annotations)
    label_names = [name for name in LABEL_ORDER if name in labels]
    label_names += [name for name in labels if name not in (*LABEL_ORDER, "alertname")]
    runbook = annotations.get(RUNBOOK_URL, "")
    if len(runbook) <= MAX_LINK_CHARACTERS and is_linkable(runbook):
        del annotations[RUNBOOK_URL]
    else:
        runbook = ""
    texts = [annotations.pop("summary", ""), *annotations.values()]
    return Section(
        rule=sanitize(alert.rule),
        title=f"{sanitize(alert.rule)} {'fires' if status == 'firing' else 'resolved'}",
        text="\n".join(sanitize(text) for text in texts if text) or sanitize(alert.rule),
        fields=tuple((sanitize(name), sanitize(labels[name])) for name in label_names if labels[name]),
        color=RESOLVED_COLOR if status == "resolved" else COLORS.get(labels.get("severity", ""), COLORS["warning"]),
        status=status,
        runbook=runbook,
    )


def _title(sections: Sequence[Section], instance: str) -> str:
    if len(sections) == 1:
        return f"{sections[0].title} on {sanitize(instance)}"
    firing = sum(section.status == "firing" for section in sections)
    counts = ((firing, "firing"), (len(sections) - firing, "resolved"))
    return f"Alerts on {sanitize(instance)}: " + ", ".join(f"{count} {state}" for count, state in counts if count)


def truncate(text: str, max_units: int, escape: Callable[[str], str] = str) -> str:
    """Return the escaped text in at most ``max_units`` UTF-16 units. An escape is never divided."""
    parts: list[str] = []
    used = 0
    for each in text:
        part = escape(each)
        size = len(part.encode("utf-16-le")) // 2
        if used + size > max_units - len(ELLIPSIS):
            rest = "".join(map(escape, text[len(parts) :]))
            fits = used + len(rest.encode("utf-16-le")) // 2 <= max_units
            return "".join(parts) + (rest if fits else ELLIPSIS)
        parts.append(part)
        used += size
    return "".join(parts)


def _slack(message: Message) -> Any:
    """Return blocks of plain text, which has neither markup nor mentions, and a text for the notification."""
    section_units = 11_000 // len(message.sections)
    blocks: list[Any] = []
    for section in message.sections:
        names = [f"{name}: {value}" for name, value in section.fields[:MAX_FIELDS]]
        labels = truncate("   ".join(names), min(1000, section_units // 3))
        blocks.append({"type": "header", "text": _slack_text(truncate(section.title, 150))})
        blocks.append({"type": "section", "text": _slack_text(truncate(section.text, min(2900, section_units // 2)))})
        elements = [_slack_text(labels)] if labels else []
        if section.runbook:
            elements.append(_slack_link(section.runbook, "Runbook"))
        if elements:
            blocks.append({"type": "context", "elements": elements})
    if message.link:
        link = _slack_link(message.link, f"gpumond on {truncate(message.instance, 100)}")
        blocks.append({"type": "section", "text": link})
    return {"text": truncate(message.title, 300, _slack_escape), "mrkdwn": False, "blocks": blocks}


def _slack_text(text: str) -> dict[str, Any]:
    return {"type": "plain_text", "text": text, "emoji": False}


def _slack_link(address: str, text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": f"<{_slack_escape(address)}|{_slack_escape(text)}>", "verbatim": True}


def _slack_escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _teams(message: Message) -> Any:
    """Return an Adaptive Card for a workflow. Its text runs have no markup, and it has no entities for mentions."""
    section_units = 3400 // len(message.sections)  # of 28 KB: in JSON a UTF-16 unit takes at most 6 bytes
    blocks: list[Any] = [_teams_text(truncate(message.title, 150), size="Large", weight="Bolder")]
    for section in message.sections:
        labels = "   ".join(f"{name}: {value}" for name, value in section.fields[:MAX_FIELDS])
        color = "Good" if section.status == "resolved" else "Attention"
        if len(message.sections) > 1:
            blocks.append(_teams_text(truncate(section.title, 80), weight="Bolder", color=color))
        blocks += [_teams_text(line) for line in truncate(section.text, section_units // 2).split("\n")]
        if labels:
            blocks.append(_teams_text(truncate(labels, section_units // 3), isSubtle=True))
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": blocks,
        "msteams": {"width": "Full"},
    }
    links = {each.runbook: f"Runbook: {truncate(each.rule, 64)}" for each in message.sections if each.runbook}
    if message.link:
        links = {message.link: "Open gpumond", **links}
    if links:
        card["actions"] = [{"type": "Action.OpenUrl", "title": title, "url": url} for url, title in links.items()]
    return {
        "type": "message",
        "attachments": [
            {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
        ],
    }


def _teams_text(text: str, **style: Any) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}


def _discord(message: Message) -> Any:
    """Return embeds. No mention notifies anyone, and Markdown is escaped."""
    section_units = 5800 // len(message.sections)
    embeds = []
    for section in message.sections:
        runbook = f" [Runbook](<{section.runbook}>)" if section.runbook else ""
        remaining = section_units - 140 - len(runbook)
        embed: dict[str, Any] = {
            "title": truncate(f"{section.title} on {message.instance}", 140, _discord_escape),
            "description": truncate(section.text, min(3000, remaining // 2), _discord_escape) + runbook,
            "color": section.color,
        }
        if message.link:
            embed["url"] = message.link
        fields = section.fields[:MAX_FIELDS]
        share = remaining // 2 // max(1, len(fields)) - 1
        embed["fields"] = [
            {
                "name": truncate(name, min(60, share // 3), _discord_escape),
                "value": truncate(value, min(1000, share - share // 3), _discord_escape),
                "inline": True,
            }
            for name, value in fields
        ]
        embeds.append(embed)
    return {"embeds": embeds, "allowed_mentions": {"parse": []}}


def _discord_escape(text: str) -> str:
    return re.sub(r"([\\*_~`|<>\[\]()#:@-])", r"\\\1", text)


def _generic(message: Message) -> Any:
    alerts: list[dict[str, Any]] = [
        {
            "status": each.status,
            "title": each.title,
            "text": each.text,
            "fields": _field_objects(each.fields),
            "runbook": each.runbook or None,
        }
        for each in message.sections
    ]
    return {
        "title": message.title,
        "text": "\n".join(f"{each.title}: {each.text}" for each in message.sections),
        "fields": [{"name": "instance", "value": message.instance}, *(alerts[0]["fields"] if len(alerts) == 1 else ())],
        "link": message.link or None,
        "alerts": alerts,
    }


def _field_objects(fields: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in fields]


_WRITERS: Mapping[Template, Callable[[Message], Any]] = dict(
    zip(get_args(Template), (_slack, _teams, _discord, _generic), strict=True)
)


SCHEMA_VERSION = 1


class Webhook(HttpReceiver):
    type: Literal["webhook"] = "webhook"
    secret_file: Path | None = Field(None, description="file with the signature key")
    template: Template | None = Field(
        None,
        description="message format: `slack`, `teams`, `discord`, or `json` (title, text, fields, link); by "
        "default, the [webhook's own format](notifications.md#the-webhook)",
    )
    page_url: str | None = Field(
        None, max_length=1024, description="address of the web UI, for the link in messages with a `template`"
    )

    @property
    def batch_limit(self) -> int:
        return super().batch_limit if self.template is None else TEMPLATE_BATCH_LIMIT

    @property
    def runbooks_address(self) -> str:
        """Return the configured address, or that of the daemon whose page is configured."""
        return self.runbooks or (f"{self.page_url.rstrip('/')}/docs/runbooks/" if self.page_url else "")

    @field_validator("page_url")
    @classmethod
    def _check_page_url(cls, url: str | None) -> str | None:
        if url is not None and not is_linkable(url):
            raise ValueError("expected an http:// or https:// address such as https://node7.example.org:9917/")
        return url

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> int:
        raised, resolved = self.with_runbook_urls(raised), self.with_runbook_urls(resolved)
        document = (
            self._document(raised, resolved)
            if self.template is None
            else message_body(self.template, raised, resolved, self.instance, self.page_url or "")
        )
        content = json.dumps(document, separators=(",", ":")).encode()
        headers = {}
        if self.secret_file:
            at = str(int(time.time()))
            headers = {
                "X-Gpumond-Timestamp": at,
                "X-Gpumond-Signature": f"sha256={signature(read_receiver_secret(self.secret_file), at, content)}",
            }
        return await post(self, "", content, headers)

    def _document(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> dict[str, Any]:
        return {
            "version": SCHEMA_VERSION,
            "receiver": self.name,
            "instance": self.instance,
            "sent_at": time.time(),
            "alerts": [
                *(alert_body("firing", alert) for alert in raised),
                *(alert_body("resolved", alert) for alert in resolved),
            ],
        }


def signature(key: str, timestamp: str, body: bytes) -> str:
    """Return the HMAC-SHA256 of ``TIMESTAMP.BODY`` in hexadecimal: the timestamp prevents a replay."""
    return hmac.new(key.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def alert_body(status: str, alert: Alert) -> dict[str, Any]:
    """Return the JSON of one alert; ``fingerprint`` is the same for all its notifications."""
    identity = json.dumps(sorted(alert.labels)).encode()
    return {
        "status": status,
        "fingerprint": hashlib.sha256(identity).hexdigest()[:16],
        "rule": alert.rule,
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "value": alert.value,
        "active_at": alert.active_at,
        "fired_at": alert.fired_at,
        "resolved_at": alert.resolved_at,
    }
