// How much the used memory of each process has changed in a range of time that ends now.

import * as address from "./address.js";
import { choice } from "./elements.js";
import { readPoints } from "./queue.js";
import { RANGES } from "./range.js";
import { changed, state } from "./store.js";

const MOST = 200; // processes, those that use most: each requires a request
const BLOCKS = 12; // of the range: the first one is what the used memory is compared with
const PAUSE = 200; // milliseconds between two drawings of what arrives
const LASTS = 60_000; // milliseconds for which a start is valid, at least

let seconds = RANGES.map(([, each]) => each).find((each) => String(each) === address.read("change")) ?? 0;
let timer = 0;
const starts = new Map(); // used bytes at the start of the range, by key of the row

/** The choice of the range. `arrange` shows the table again. */
export function createRanges(arrange) {
  const pairs = [["", "nothing"], ...RANGES.map(([text, each]) => [String(each), text])];
  const select = choice(pairs, { id: "change" });
  select.value = seconds || "";
  select.addEventListener("change", () => {
    seconds = Number(select.value);
    starts.clear();
    address.write("change", select.value);
    arrange();
  });
  return select;
}

export const showsChanges = () => seconds > 0;

/** Adds `change_bytes` to the rows, null if it is unknown, and requests what is missing. */
export function addChanges(rows) {
  if (!seconds) return;
  const largest = [...rows].filter((row) => row.used_bytes !== null).sort((one, other) => other.used_bytes - one.used_bytes);
  for (const row of largest.slice(0, MOST)) {
    const start = starts.get(row.key);
    row.change_bytes = start && start.bytes !== null ? row.used_bytes - start.bytes : null;
    if (!start || start.until < performance.now()) request(row, start);
  }
}

async function request({ key, device_uuid: uuid, pid, start_ticks: ticks }, before) {
  const own = seconds;
  const { taken_at: now, elapsed_seconds: age } = state.frame.snapshot;
  starts.set(key, { bytes: before?.bytes ?? null, until: Infinity });
  const resolution = Math.max(1, Math.min(own, age) / BLOCKS);
  const points = await readPoints({ uuid, pid, since: now - own, resolution, ...(ticks === null ? {} : { start_ticks: ticks }) });
  if (own !== seconds) return;
  const until = performance.now() + Math.max(LASTS, (1000 * own) / BLOCKS);
  starts.set(key, { bytes: points[0]?.median ?? null, until });
  timer ||= setTimeout(show, PAUSE);
}

function show() {
  timer = 0;
  changed();
}
