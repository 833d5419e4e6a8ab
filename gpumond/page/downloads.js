// What is shown, as tables for CSV and as JSON.

import { saveBlob } from "./elements.js";
import { besides } from "./shares.js";
import { state } from "./state.js";
import { SHARES } from "./words.js";

/** A unix time as ISO 8601, which pandas and Excel read as a time. */
const isoTime = (at) => new Date(1000 * at).toISOString();

const indexOf = (uuid) => state.devices.get(uuid)?.index ?? null;

/** A record whose times are ISO 8601, and whose device has its index, too. */
export function readable(record) {
  const pairs = Object.entries(record).flatMap(([field, value]) => {
    if (field === "device_uuid") return [["gpu", indexOf(value)], [field, value]];
    return [[field, /(^|_)at$/.test(field) && value !== null ? isoTime(value) : value]];
  });
  return Object.fromEntries(pairs);
}

/** An event with its details, in place of `id` and `start_ticks`. */
export const eventRecord = ({ at, kind, device_uuid, pid, workload, summary, details }) =>
  ({ at, kind, device_uuid, pid, workload, summary, ...Object.fromEntries(details.filter(([field]) => /^\w+$/.test(field))) });

/** Records as a table, whose columns are all their fields. */
export function tableOf(all) {
  const fields = [...new Set(all.flatMap((record) => Object.keys(record)))];
  return [fields, ...all.map((record) => fields.map((field) => record[field] ?? null))];
}

/** The intervals of a chart as a table. In each row, the shares less the overcount are what is used, and with the free
and the reserved bytes the size. `device`: index, UUID, size and reserved bytes of what is shown. */
export function chartTable(columns, { index = null, uuid = null, size, reserved }) {
  const shares = SHARES.filter((share) => columns.some((column) => share in column));
  const rows = columns.map((column) => {
    const values = [column.used, ...shares.map((share) => column[share] ?? null), ...Object.values(besides(column, size, reserved))];
    return [isoTime(column.at), isoTime(column.end), index, uuid, ...values];
  });
  const fields = ["used", ...shares, "overcount", ...(size === null ? [] : ["free", "reserved", "size"])];
  return [["from", "to", "gpu", "device_uuid", ...fields.map((field) => `${field}_bytes`)], ...rows];
}

/** The name of a file with what was at a time, such as `gpumond-gpu-0-20261127T123046Z.csv`. */
export const fileName = (subject, at) => `gpumond-${subject}-${isoTime(Math.floor(at)).replace(/[-:]|\.000/g, "")}.csv`;

/** A table as CSV (RFC 4180). Unknown values are empty. A text that a spreadsheet would compute begins with an
apostrophe. */
export const csvOf = (table) => table.map((row) => `${row.map(cell).join(",")}\r\n`).join("");

/** Saves records as a CSV file. */
export function saveCsv(name, all) {
  saveBlob(`gpumond-${name}.csv`, new Blob([csvOf(tableOf(all.map(readable)))], { type: "text/csv" }));
}

function cell(value) {
  if (value === null) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
