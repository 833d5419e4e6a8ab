from __future__ import annotations

from tests.loadgen.loads import device as device
