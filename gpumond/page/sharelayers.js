// Layers of a chart: the shares of a device, a process or the machine, stacked.

import { SHARES } from "./words.js";

const NEAR = 0.4; // of the length of an interval
const FIELDS = ["at", "low", "high", "used", ...SHARES];

/** Lower and upper edge of each share that is known and not hidden, in bytes. */
export function layersOf(column, hidden = new Set()) {
  const found = {};
  let base = 0;
  for (const share of SHARES) {
    if (column[share] === undefined || hidden.has(share)) continue;
    found[share] = [base, base + column[share]];
    base += column[share];
  }
  return found;
}

/** The interval that contains a time. */
export const columnAt = (columns, at) => columns.find((column) => column.at <= at && at < column.end);

/** The intervals in which a share is known, as runs of those that follow one another. */
export function runsOf(columns, share) {
  const runs = [];
  let end = null;
  for (const column of columns) {
    const edges = column.layers[share];
    if (!edges) continue;
    if (end === null || column.at - end > NEAR * (column.end - column.at)) runs.push([]);
    runs.at(-1).push({ at: column.at, end: column.end, low: edges[0], high: edges[1] });
    end = column.end;
  }
  return runs;
}

/** The upper edge of everything that is drawn. */
export const topOf = (columns) =>
  columns.reduce((top, column) => Math.max(top, column.high, ...Object.values(column.layers).map(([, high]) => high)), 1);

/** Columns of an answer as points; an unknown share is absent. */
export function pointsOf(columns) {
  return columns.at.map((_, place) =>
    Object.fromEntries(FIELDS.map((name) => [name, columns[name][place]]).filter(([, value]) => value !== null)),
  );
}
