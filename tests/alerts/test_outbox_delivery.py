"""Delivery of notifications over random outages, crashes and replacements, with a real store."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.alerts.deliveries import Delivery

pytestmark = pytest.mark.slow

Delivery.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestDelivery = Delivery.TestCase
