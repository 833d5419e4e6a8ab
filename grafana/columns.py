"""Columns of tables that several dashboards have."""

from __future__ import annotations

from grafana.parts import Column, leads_to

MACHINE = Column("instance", "Machine", leads_to("device", machine="__value.raw"))
DEVICE = Column("uuid", "Device", hidden=True)
"""The UUID, for the link of GPU."""
GPU = Column("gpu", "GPU", leads_to("device", machine='__data.fields["Machine"]', device='__data.fields["Device"]'))
WORKLOAD = Column(
    "workload", "Workload", leads_to("workload", machine='__data.fields["Machine"]', workload="__value.raw")
)
PID = Column("pid", "PID")
