// Reads the history of the shares of a device, a process or the machine: completely at first, and then what is new; and
// what was held at one time.

import { joined } from "./intervals.js";
import { pointsOf } from "./sharelayers.js";
import { read } from "./live.js";

const MOST = 1000; // points above which all are read again, in the resolution that fits the range

/** Points of a range and the length of a block, null for samples. `known`: what the last call returned for the same
range, if there was one. `to`: the end of a closed range, null if the range follows the newest frame. */
export async function readPast(target, { from, to }, known) {
  const continued = known && known.points.length > 1 && known.points.length < MOST;
  const query = new URLSearchParams({ since: from });
  if (to !== null) query.set("until", to);
  if (continued) {
    const [before, last] = known.points.slice(-2);
    query.set("since", (before.at + last.at) / 2);
    query.set("resolution", known.resolution ?? 1);
  }
  for (const name of ["uuid", "pid", "start_ticks"]) if (target[name]) query.set(name, target[name]);
  const answer = await read(`api/v1/history/shares?${query}`);
  if (!answer.ok) return { points: [], seconds: null };
  const found = await answer.json();
  const fresh = pointsOf(found);
  const points = continued ? joined(known.points, fresh, from) : fresh;
  return { points, seconds: found.block_seconds, resolution: found.resolution_seconds };
}

/** What each device and process held at a time; null if it is unknown. */
export async function holdingsAt(at) {
  const answer = await read(`api/v1/history/moment?at=${at}`).catch(() => null);
  return answer?.ok ? (await answer.json()).holdings : null;
}
