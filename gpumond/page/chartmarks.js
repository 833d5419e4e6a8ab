// Marks on the time axis of a chart: events of its device or process.

import { causeOf } from "./eventgroups.js";
import { MARKS, REPEATS } from "./words.js";

const URGENT = ["▲", "✕"]; // signs that are shown for several marks, the last first
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
    const { at, kind } = event;
    const cause = REPEATS[kind] && `${event.pid} ${causeOf(event)}`;
    const before = errors.get(cause);
    if (cause && at - before?.last <= REPEATS[kind]) {
      Object.assign(before, { last: at, times: before.times + 1 });
      continue;
    }
    marks.push({ ...event, sign: MARKS[kind], last: at, times: 1 });
    if (cause) errors.set(cause, marks.at(-1));
  }
  return marks;
}

/** Seconds between groups of marks: at least these, and the same while a range grows a little. */
export const spaceOf = (seconds) => 2 ** Math.ceil(Math.log2(seconds));

/** The more urgent one of two marks. */
const worse = (one, other) => (URGENT.indexOf(other.sign) > URGENT.indexOf(one.sign) ? other : one);
/** The mark that stands for a group: the first one of the most urgent. */
export const worst = (group) => group.reduce(worse);

/** All marks in groups, which a later range leaves as they are: each mark is less than `seconds` after the one that
stands for those before it. */
export function together(marks, seconds) {
  const groups = [];
  let shown;
  for (const mark of marks) {
    const joins = shown && mark.at - shown.at < seconds;
    if (joins) groups.at(-1).push(mark);
    else groups.push([mark]);
    shown = joins ? worse(shown, mark) : mark;
  }
  return groups;
}

/** The marks close to a time. */
export const marksAt = (marks, at, from, to) => marks.filter((mark) => Math.abs(mark.at - at) <= NEAR * (to - from));
