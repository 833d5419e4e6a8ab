// What is shown, as tables for CSV and as JSON.

import { SHARES } from "./words.js";

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

/** Records as a table, whose columns are all their fields. */
export function tableOf(all) {
  const fields = [...new Set(all.flatMap((record) => Object.keys(record)))];
  return [fields, ...all.map((record) => fields.map((field) => record[field] ?? null))];
}

/** The intervals of a chart as a table: times (ISO 8601, UTC) and bytes. */
export function chartTable({ columns }) {
  const fields = ["used", ...SHARES].filter((field) => columns.some((column) => field in column));
  const time = (at) => new Date(1000 * at).toISOString();
  const rows = columns.map((column) => [time(column.at), time(column.end), ...fields.map((field) => column[field] ?? null)]);
  return [["from", "to", ...fields.map((field) => `${field}_bytes`)], ...rows];
}

/** A table as CSV (RFC 4180). Unknown values are empty. A text that a spreadsheet would compute begins with an
apostrophe. */
export const csvOf = (table) => table.map((row) => `${row.map(cell).join(",")}\r\n`).join("");

function cell(value) {
  if (value === null) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
