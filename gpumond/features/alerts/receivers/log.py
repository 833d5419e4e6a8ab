"""Alerts in the daemon's log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers.base import ReceiverType

logger = logging.getLogger(__name__)


class Log(ReceiverType):
    type: Literal["log"] = "log"

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        for alert in raised:
            logger.warning("alert %s fires: %s", alert.rule, _text(alert))
        for alert in resolved:
            logger.info("alert %s resolved: %s", alert.rule, _text(alert))


def _text(alert: Alert) -> str:
    labels = " ".join(f"{name}={value}" for name, value in alert.labels if name != "alertname")
    annotations = "; ".join(text if name != "case" else f"case {text}" for name, text in alert.annotations)
    return f"{annotations} ({labels})" if annotations else labels
