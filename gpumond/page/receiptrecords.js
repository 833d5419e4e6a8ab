// Receipts as records of a download.

const interval = (name, expected) => ({
  [`${name}_low_bytes`]: expected?.low ?? null,
  [`${name}_high_bytes`]: expected?.high ?? null,
});

/** The record of a receipt. */
export const record = ({ planned, expected, ...receipt }) => ({
  started_at: receipt.started_at,
  pid: receipt.pid,
  start_ticks: receipt.start_ticks,
  workload: receipt.workload,
  device_uuid: receipt.device_uuid,
  allocator: receipt.allocator,
  outcome: receipt.outcome,
  ...interval("planned", planned),
  ...interval("expected", expected),
  released_bytes: receipt.released_bytes,
  driver_released_bytes: receipt.driver_released_bytes,
  requested_by: receipt.requested_by,
  requested_for: receipt.requested_for,
  reason: receipt.reason,
});
