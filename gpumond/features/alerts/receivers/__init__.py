"""Receivers in the configuration file: the key ``type`` chooses one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from gpumond.features.alerts.receivers.alertmanager import Alertmanager
from gpumond.features.alerts.receivers.base import ReceiverType
from gpumond.features.alerts.receivers.log import Log
from gpumond.features.alerts.receivers.webhook import Webhook

ReceiverConfig = Log | Webhook | Alertmanager
"""All types of receivers."""

RECEIVER_TYPES: Mapping[str, type[ReceiverType]] = {
    each.model_fields["type"].default: each for each in get_args(ReceiverConfig)
}

LOG_ONLY = (Log(name="log"),)
"""The default: alerts are in the daemon's log."""
