// Marks on the time axis of a chart: events of its device or process.

import { MARKS } from "./words.js";

const NEAR = 0.01; // of the range: marks that the crosshair names

/** Events of the machine, a device, or one process on it, as marks within a range. */
export function marksOf(events, { uuid, pid, start_ticks: start }, from, to) {
  const own = (event) =>
    pid === null
      ? !uuid || event.device_uuid === uuid
      : event.pid === pid && (event.start_ticks === start || event.start_ticks === null) && [uuid, null].includes(event.device_uuid);
  return events
    .filter((event) => MARKS[event.kind] && event.at >= from && event.at <= to && own(event))
    .sort((one, other) => one.at - other.at)
    .map(({ id, at, kind, summary }) => ({ id, at, kind, sign: MARKS[kind], summary }));
}

/** Marks in groups: each begins less than `seconds` after the first one of its group. */
export function together(marks, seconds) {
  const groups = [];
  for (const mark of marks) {
    if (groups.length && mark.at - groups.at(-1)[0].at < seconds) groups.at(-1).push(mark);
    else groups.push([mark]);
  }
  return groups;
}

/** The marks close to a time. */
export const marksAt = (marks, at, from, to) => marks.filter((mark) => Math.abs(mark.at - at) <= NEAR * (to - from));
