// How much the used memory of each process has changed in a range of time that ends now.

import * as address from "./address.js";
import { choice } from "./elements.js";
import { earlierLives } from "./previousprocesses.js";
import { clock } from "./format.js";
import { readPoints } from "./historyrequests.js";
import { RANGES } from "./range.js";
import { changed, state } from "./state.js";

const MOST = 200; // processes, those that use most: each requires a request
const PARTS = 12; // of the range: a start is requested for two of them, and again after one
const TICKS = 100; // of start_ticks in a second
const PAUSE = 200; // milliseconds between two drawings of what arrives
const FIRST = 10; // seconds after the daemon's start in which it reads what was there already

let seconds = RANGES.map(([, each]) => each).find((each) => String(each) === address.read("change")) ?? 0;
let timer = 0;
const starts = new Map(); // by key of the row: points at and after the start of the range, the pid that they are of, and its start

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

/** What changes are compared with if the daemon is younger than the range. */
export function baseOf({ taken_at: now, elapsed_seconds: elapsed }) {
  return seconds > elapsed ? `change since ${clock(now - elapsed)}, when the daemon started` : "";
}

/** Adds `change_bytes` to the rows, null if it is unknown, `change_since`, the time of the first known value if the range
begins before it, and `change_pid`, the earlier process of the workload that had it, if one did; requests what is missing.
Of a program that started in the range, all is `change_new`. */
export function addChanges(rows) {
  if (!seconds) return;
  const { taken_at: now, elapsed_seconds: elapsed } = state.frame.snapshot;
  const from = now - seconds;
  const begin = Math.max(from, now - elapsed + FIRST);
  const largest = [...rows].filter((row) => row.used_bytes !== null).sort((one, other) => other.used_bytes - one.used_bytes);
  for (const row of largest.slice(0, MOST)) {
    const start = starts.get(row.key);
    const point = start && (start.points.findLast(({ at }) => at <= from) ?? start.points[0]);
    row.change_new = start?.began > begin;
    const known = point?.at <= begin + seconds / PARTS;
    row.change_bytes = row.change_new ? row.used_bytes : known ? row.used_bytes - point.median : null;
    row.change_since = point?.at > from + seconds / PARTS ? point.at : null;
    row.change_pid = known && !row.change_new && start.pid !== row.pid ? start.pid : null;
    if (!start || start.until < performance.now()) request(row, start);
  }
}

async function request(row, before) {
  const own = seconds;
  const since = state.frame.snapshot.taken_at - own;
  starts.set(row.key, { points: [], pid: row.pid, ...before, until: Infinity });
  let points = [];
  let pid;
  let began;
  for (const life of [...earlierLives(row, since), row]) {
    const { start_ticks: ticks } = life;
    const query = { uuid: row.device_uuid, pid: life.pid, since, ...(ticks === null ? {} : { start_ticks: ticks }) };
    points = await readPoints({ ...query, until: since + (2 * own) / PARTS });
    if (!points.length) points = (await readPoints(query)).slice(0, 1);
    ({ pid } = life);
    began = row.started_at - (row.start_ticks - ticks) / TICKS;
    if (points.length) break;
  }
  if (own !== seconds) return;
  const valid = Math.max(own / PARTS, (points[0]?.at ?? since) - since);
  starts.set(row.key, { points, pid, began, until: performance.now() + 1000 * valid });
  timer ||= setTimeout(show, PAUSE);
}

function show() {
  timer = 0;
  changed();
}
