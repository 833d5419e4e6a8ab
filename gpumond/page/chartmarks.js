// Marks on the time axis of a chart: events of its device or process.

import { repeats } from "./eventgroups.js";
import { MARKS } from "./words.js";

const URGENT = ["▲", "✕"]; // signs that are shown for several marks, the last first
const NEAR = 0.01; // of the range: marks that the crosshair names

/** Events of the machine, a device, or one process on it, as marks. Repeats of an error are one mark, of the first. */
export function marksOf(events, { uuid, pid, start_ticks: start }) {
  const own = (event) =>
    pid === null
      ? !uuid || event.device_uuid === uuid
      : event.pid === pid && (event.start_ticks === start || event.start_ticks === null) && [uuid, null].includes(event.device_uuid);
  const marks = [];
  for (const event of events.filter((each) => MARKS[each.kind] && own(each)).sort((one, other) => one.at - other.at)) {
    const before = marks.findLast((mark) => repeats(event, mark, mark.last));
    if (before) Object.assign(before, { last: event.at, times: before.times + 1 });
    else marks.push({ ...event, sign: MARKS[event.kind], last: event.at, times: 1 });
  }
  return marks;
}

/** Seconds between groups of marks: at least these, and the same while a range grows a little. */
export const spaceOf = (seconds) => 2 ** Math.ceil(Math.log2(seconds));

const urgency = ({ sign }) => URGENT.indexOf(sign);
const isFlush = ({ kind }) => kind === "flush";

/** All marks in groups, each less than `seconds` from the one that stands for its group: the first one, which is the most
urgent. Those of different groups are at least `seconds` apart, or one is that of flushes, which are grouped alone. */
export function together(marks, seconds) {
  const groups = [];
  for (const mark of [...marks].sort((one, other) => urgency(other) - urgency(one))) {
    const group = groups.find(([shown]) => Math.abs(mark.at - shown.at) < seconds && isFlush(mark) === isFlush(shown));
    if (group) group.push(mark);
    else groups.push([mark]);
  }
  return groups;
}

/** The marks close to a time. */
export const marksAt = (marks, at, from, to) => marks.filter((mark) => Math.abs(mark.at - at) <= NEAR * (to - from));
