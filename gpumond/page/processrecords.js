// Rows of the table of processes as records. No element of the document.

const FIELDS = [
  "pid",
  "start_ticks",
  "program",
  "comm",
  "owner",
  "container_name",
  "pod_namespace",
  "pod_name",
  "unit",
  "slurm_job",
  "used_bytes",
  "live_bytes",
  "cached_bytes",
  "stranded_bytes",
  "waste_bytes",
  "overhead_bytes",
  "opaque_bytes",
  "unmapped_bytes",
  "utilization_ratio",
  "idle_seconds",
  "verdict",
];
const GROUP_FIELDS = FIELDS.filter((field) => field.endsWith("_bytes") && field !== "unmapped_bytes");

/** Rows of the table of processes as records, groups with their sums. Unknown values are null. */
export const records = (list) => list.map((item) => (item.rows ? groupRecord(item) : processRecord(item)));

const pick = (item, fields) => Object.fromEntries(fields.map((field) => [field, item[field] ?? null]));

/** The change in the chosen range, if there is one and it is known. */
const changeOf = ({ change_bytes: bytes = null, partial }) =>
  bytes === null || partial?.has("change") ? {} : { change_bytes: bytes };

function processRecord(row) {
  return { gpu: row.device?.index ?? null, device_uuid: row.device_uuid, ...pick(row, FIELDS), ...changeOf(row) };
}

function groupRecord(group) {
  return { group: group.title, processes: group.rows.length, ...pick(group, GROUP_FIELDS), ...changeOf(group) };
}
