// Layers of a chart: the signals of a device or a process, stacked.

const NEAR = 0.4; // of the length of an interval

/** Names of the layers, from below. The daemon keeps no separate history of cached and stranded bytes. */
export const LAYERS = { live: "live", pooled: "cached and stranded", rest: "overhead and opaque", unattributed: "unattributed" };

/** The shares that the layer `rest` is: `opaque` without an agent, and `overhead` of a process with one. `whole`: of all
processes of a device. */
export function restOf(columns, whole) {
  if (columns.every(({ held }) => held === undefined)) return "opaque";
  return whole ? LAYERS.rest : "overhead";
}

/** Intervals of time with the median of each signal; a signal that is unknown is absent. Intervals of different signals
are the same if they begin at almost the same time: see `joined` in intervals.js. An interval after the last one with the
used memory is left out, because the used memory was requested first. */
export function columnsOf(signals) {
  const all = Object.entries(signals).flatMap(([name, ranges]) => ranges.map((range) => ({ name, ...range })));
  all.sort((one, other) => one.at - other.at);
  const lengths = all.map(({ at, end }) => end - at).sort((one, other) => one - other);
  const near = NEAR * (lengths[lengths.length >> 1] ?? 0);
  const columns = [];
  for (const { name, at, end, median } of all) {
    const last = columns.at(-1);
    if (last && at - last.at < near && !(name in last)) Object.assign(last, { end: Math.min(last.end, end), [name]: median });
    else columns.push({ at, end, [name]: median });
  }
  const final = (signals.used?.at(-1)?.at ?? Infinity) + near;
  return columns.filter(({ at }) => at <= final);
}

/** Lower and upper edge of each layer that is known, in bytes. Together they are the used memory, unless the reports of
agents exceed it. */
export function layersOf({ live, held, used, unattributed = 0 }) {
  const base = Math.max(live ?? 0, held ?? 0);
  const found = {};
  if (live !== undefined) found.live = [0, live];
  if (held !== undefined) found.pooled = [live ?? 0, base];
  if (used === undefined) return found;
  const claimed = Math.max(base, used - unattributed);
  if (claimed > base) found.rest = [base, claimed];
  if (unattributed > 0) found.unattributed = [claimed, Math.max(claimed, used)];
  return found;
}

/** The interval that contains a time. */
export const columnAt = (columns, at) => columns.find((column) => column.at <= at && at < column.end);

/** The intervals in which a layer is known, as runs of those that follow one another. */
export function runsOf(columns, layer) {
  const runs = [];
  let end = null;
  for (const column of columns) {
    const edges = layersOf(column)[layer];
    if (!edges) continue;
    if (end === null || column.at - end > NEAR * (column.end - column.at)) runs.push([]);
    runs.at(-1).push({ at: column.at, end: column.end, low: edges[0], high: edges[1] });
    end = column.end;
  }
  return runs;
}

/** The upper edge of everything that is drawn. */
export function topOf(columns, used) {
  const edges = columns.flatMap((column) => Object.values(layersOf(column)).map(([, high]) => high));
  return Math.max(1, ...edges, ...used.map(({ high }) => high));
}
