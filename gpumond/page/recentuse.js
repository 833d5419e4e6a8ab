// The used memory of a device or of a process on it in the last 15 minutes, as a line. It is requested once, and then
// continued by frames.

import { svg } from "./elements.js";
import { readPoints } from "./historyrequests.js";
import { STEP, add, heightOf, sparkLine } from "./sparkline.js";

const SECONDS = 900;
const RESOLUTION = 15; // seconds of a block of the past
const YOUNGEST = 120; // seconds that the line of a younger daemon spans
const GAP = 60; // seconds without a point after which the past is requested again
const FAR = 4; // times the highest use
const MOST = 128; // lines that are kept

const known = new Map(); // points of each device and process

export function createSpark() {
  const drawing = svg("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(svg("path", {}));
  return drawing;
}

/** Shows the line of a device up to a frame. */
export function showSpark(drawing, device, snapshot) {
  const line = sparkLine(pointsOf(device, snapshot), device.size_bytes, ...spanOf(snapshot), GAP);
  if (drawing.line !== line) drawing.firstChild.setAttribute("d", (drawing.line = line));
}

/** Paths 100 wide and 20 high of the used memory of a device, or a process on it, and of a level unless it is far above. */
export function usedPaths(subject, level, snapshot) {
  const points = pointsOf(subject, snapshot);
  if (!points.length) return {};
  const most = Math.max(1, ...points.map(({ high }) => high));
  const near = level !== null && level <= FAR * most;
  const top = near ? Math.max(level, most) : most;
  const used = sparkLine(points, top, ...spanOf(snapshot), GAP);
  return near ? { used, full: `M0 ${heightOf(level, top)}H100` } : { used };
}

/** Seconds that a line spans: whole minutes. */
export const secondsOf = ({ elapsed_seconds: elapsed }) => Math.min(SECONDS, Math.max(60 * Math.ceil(elapsed / 60), YOUNGEST));

const spanOf = (snapshot) => [snapshot.taken_at - secondsOf(snapshot), snapshot.taken_at];

function pointsOf({ uuid, pid = null, start_ticks, used_bytes: used }, { taken_at: now }) {
  const key = [uuid, pid, start_ticks].join();
  if (!known.has(key)) known.set(key, { points: [], asked: -Infinity });
  if (known.size > MOST) known.delete(known.keys().next().value);
  const series = known.get(key);
  const last = series.points.at(-1)?.at ?? -Infinity;
  if (now - Math.max(last, series.asked) > GAP) request(series, { uuid, ...(pid !== null && { pid, start_ticks }) }, now);
  if (used !== null) add(series.points, { at: now, low: used, median: used, high: used });
  while (series.points[0]?.at < now - SECONDS - STEP) series.points.shift();
  return series.points;
}

async function request(series, of, now) {
  series.asked = now;
  const since = now - SECONDS;
  let past = await readPoints({ ...of, since, resolution: RESOLUTION });
  if (!(past[0]?.at < since + GAP)) past = await readPoints({ ...of, since }); // the demo's blocks are shorter
  const all = [...past, ...series.points].sort((one, other) => one.at - other.at);
  series.points = [];
  for (const point of all) add(series.points, point);
}
