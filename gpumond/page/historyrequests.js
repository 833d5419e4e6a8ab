// Requests of the history of many series: few at a time, so that others need not wait for a connection.

import { read } from "./live.js";

const AT_ONCE = 2;

const waiting = [];
let active = 0;

/** The points of a series; none if it is unknown. */
export function readPoints(query) {
  return new Promise((resolve) => {
    waiting.push(async () => resolve(await pointsOf(query).catch(() => [])));
    next();
  });
}

async function pointsOf(query) {
  const answer = await read(`api/v1/history?${new URLSearchParams(query)}`);
  return answer.ok ? (await answer.json()).points : [];
}

async function next() {
  if (active >= AT_ONCE || !waiting.length) return;
  active += 1;
  await waiting.shift()();
  active -= 1;
  next();
}
