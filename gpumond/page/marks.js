// Marks on the time axis of a chart: events of its device or process.

import { MARKS } from "./words.js";

const NEAR = 0.01; // of the range: marks that the crosshair names

/** Events of the machine, a device, or one process on it, as marks. */
export function marksOf(events, { uuid, pid, start_ticks: start }) {
  const own = (event) =>
    pid === null
      ? !uuid || event.device_uuid === uuid
      : event.pid === pid && (event.start_ticks === start || event.start_ticks === null) && [uuid, null].includes(event.device_uuid);
  return events
    .filter((event) => MARKS[event.kind] && own(event))
    .sort((one, other) => one.at - other.at)
    .map(({ id, at, kind, summary }) => ({ id, at, kind, sign: MARKS[kind], summary }));
}

/** Seconds between groups of marks: at least these, and the same while a range grows a little. */
export const spaceOf = (seconds) => 2 ** Math.ceil(Math.log2(seconds));

/** All marks in groups, which later marks and a later range leave as they are: each mark is less than `seconds` after the
first one of its group. */
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
