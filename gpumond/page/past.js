// Reads the history of a device or a process: completely at first, and then what is new.

import { intervals, joined } from "./intervals.js";
import { read } from "./stream.js";

const MOST = 1000; // points above which all are read again, in the resolution that fits the range

/** Intervals of each signal, and whether they are blocks. `known` keeps the points of each signal from call to call; the
caller empties it for another range. */
export async function readPast(target, names, about, known) {
  const { from, to, started } = about;
  const signals = {};
  let blocks = false;
  const add = async (name) => {
    const found = await history(target, name, from, known.get(name));
    known.set(name, found);
    const within = found.points.filter(({ at }) => at < to);
    signals[name] = intervals(within, found.block_seconds, from, to, started);
    blocks ||= found.block_seconds !== null;
  };
  const [first, ...others] = names;
  await add(first);
  await Promise.all(others.map(add));
  return { signals, blocks };
}

async function history(target, signal, from, known) {
  const continued = known && known.points.length > 1 && known.points.length < MOST;
  const query = new URLSearchParams({ uuid: target.uuid, signal, since: from });
  if (continued) {
    const [before, last] = known.points.slice(-2);
    query.set("since", (before.at + last.at) / 2);
    query.set("resolution", known.resolution_seconds ?? 1);
  }
  if (target.pid) query.set("pid", target.pid);
  if (target.start_ticks) query.set("start_ticks", target.start_ticks);
  const answer = await read(`api/v1/history?${query}`);
  if (!answer.ok) return { points: [], block_seconds: null };
  const found = await answer.json();
  return continued ? { ...found, points: joined(known.points, found.points, from) } : found;
}
