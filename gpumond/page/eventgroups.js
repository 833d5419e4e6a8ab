// Events that have one cause, such as the end of a process, together.

import { clock } from "./format.js";
import { FOLLOWS, MARKS, REPEATS } from "./words.js";

const SECONDS = 5; // between an event and those that follow from it
const KINDS = Object.keys(MARKS);
const rank = ({ kind }) => KINDS.indexOf(kind);
const detailsOf = ({ details }) => Object.fromEntries(details);
/** What an error that repeats has in common with its repeats. */
const causeOf = (event) => event.kind + event.device_uuid + detailsOf(event).limit_bytes;
/** The rule of an alert, or the kind of a verdict. */
const ruleOf = (event) => detailsOf(event).rule ?? detailsOf(event).verdict;

const ofOneProcess = (event, other) => event.pid !== null && event.pid === other.pid;
const follows = (event, first) =>
  ofOneProcess(event, first) && FOLLOWS[first.kind]?.includes(event.kind) && Math.abs(event.at - first.at) < SECONDS && [undefined, ruleOf(event)].includes(ruleOf(first));
/** True if an event repeats an error that was last repeated at `last`. */
export const repeats = (event, error, last = error.at) => ofOneProcess(event, error) && event.at - last <= REPEATS[event.kind] && causeOf(event) === causeOf(error);

/** Groups of events of one process: the one that tells most, or the first of an error's repeats, by which groups are
ordered, and what follows from it or repeats it. */
export function causesOf(events) {
  const groups = [];
  for (const event of [...events].sort((one, other) => rank(one) - rank(other) || one.id - other.id)) {
    const group = groups.find((each) => follows(event, each[0]) || repeats(event, each.at(-1)));
    if (group) group.push(event);
    else groups.push([event]);
  }
  return groups.sort(([one], [other]) => other.id - one.id);
}

/** How often an error has been repeated. */
export const timesOf = ({ times, last }, to) => (times > 1 ? ` (${times} times, the last at ${clock(last, to)})` : "");
