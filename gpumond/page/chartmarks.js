// Marks on the time axis of a chart: events of its device or process.

import { causeOf } from "./eventgroups.js";
import { MARKS, REPEATS } from "./words.js";

const NEAR = 0.01; // of the range: marks that the crosshair names

/** Events of the machine, a device, or one process on it, as marks. Repeats of an error are one mark, of the first. */
export function marksOf(events, { uuid, pid, start_ticks: start }) {
  const own = (event) =>
    pid === null
      ? !uuid || event.device_uuid === uuid
      : event.pid === pid && (event.start_ticks === start || event.start_ticks === null) && [uuid, null].includes(event.device_uuid);
  const errors = new Map(); // the newest mark of each cause
  const marks = [];
  for (const event of events.filter((each) => MARKS[each.kind] && own(each)).sort((one, other) => one.at - other.at)) {
    const { id, at, kind, summary } = event;
    const cause = REPEATS[kind] && `${event.pid} ${causeOf(event)}`;
    const before = errors.get(cause);
    if (cause && at - before?.last <= REPEATS[kind]) {
      Object.assign(before, { last: at, times: before.times + 1 });
      continue;
    }
    marks.push({ id, at, kind, sign: MARKS[kind], summary, last: at, times: 1 });
    if (cause) errors.set(cause, marks.at(-1));
  }
  return marks;
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
