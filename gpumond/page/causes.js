// Events that have one cause, such as the end of a process, together.

import { MARKS } from "./words.js";

const SECONDS = 5; // between the first event of a cause and its last
const KINDS = Object.keys(MARKS);
const rank = ({ kind }) => KINDS.indexOf(kind);

/** Groups of events: those of one process within seconds, the one that tells most first, by which groups are ordered. */
export function causesOf(events) {
  const groups = [];
  for (const event of [...events].sort((one, other) => other.id - one.id)) {
    const same = ([newest]) => newest.pid !== null && newest.pid === event.pid && newest.at - event.at < SECONDS;
    const group = groups.find(same);
    if (group) group.push(event);
    else groups.push([event]);
  }
  for (const group of groups) group.sort((one, other) => rank(one) - rank(other));
  return groups.sort(([one], [other]) => other.id - one.id);
}
