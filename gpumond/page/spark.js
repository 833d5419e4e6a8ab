// The used memory of a device in the last 15 minutes, as a line. It is requested once, and then continued by frames.

import { svg } from "./elements.js";
import { readPoints } from "./queue.js";
import { STEP, add, sparkLine } from "./sparkline.js";

const SECONDS = 900;
const RESOLUTION = 15; // seconds of a block of the past
const YOUNGEST = 120; // seconds that the line of a younger daemon spans
const GAP = 60; // seconds without a point after which the past is requested again

const known = new Map(); // points of each device, by UUID

export function createSpark() {
  const drawing = svg("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(svg("path", {}));
  return drawing;
}

/** Shows the line up to a frame that was taken at `now`. */
export function showSpark(drawing, { uuid, used_bytes: used, size_bytes: size }, { taken_at: now, elapsed_seconds: elapsed }) {
  if (!known.has(uuid)) known.set(uuid, { points: [], asked: -Infinity });
  const series = known.get(uuid);
  const last = series.points.at(-1)?.at ?? -Infinity;
  if (now - Math.max(last, series.asked) > GAP) request(series, uuid, now);
  if (used !== null) add(series.points, { at: now, low: used, median: used, high: used });
  while (series.points[0]?.at < now - SECONDS - STEP) series.points.shift();
  const line = sparkLine(series.points, size, now - Math.min(SECONDS, Math.max(elapsed, YOUNGEST)), now, GAP);
  if (drawing.line !== line) drawing.firstChild.setAttribute("d", (drawing.line = line));
}

async function request(series, uuid, now) {
  series.asked = now;
  const since = now - SECONDS;
  let past = await readPoints({ uuid, since, resolution: RESOLUTION });
  if (!(past[0]?.at < since + GAP)) past = await readPoints({ uuid, since }); // the demo's blocks are shorter
  const all = [...past, ...series.points].sort((one, other) => one.at - other.at);
  series.points = [];
  for (const point of all) add(series.points, point);
}
