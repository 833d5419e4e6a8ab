// Receipts as records of a download.

const interval = (name, expected) => ({
  [`${name}_low_bytes`]: expected?.low ?? null,
  [`${name}_high_bytes`]: expected?.high ?? null,
});

/** The record of a receipt. */
export const record = ({ started_at, pid, start_ticks, workload, device_uuid, allocator, outcome, planned, expected, released_bytes, driver_released_bytes, requested_by, requested_for, reason }) => ({
  started_at,
  pid,
  start_ticks,
  workload,
  device_uuid,
  allocator,
  outcome,
  ...interval("planned", planned),
  ...interval("expected", expected),
  released_bytes,
  driver_released_bytes,
  requested_by,
  requested_for,
  reason,
});
