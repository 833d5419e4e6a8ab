// Events that have one cause, such as the end of a process, together.

import { MARKS, REPEATS } from "./words.js";

const SECONDS = 5; // between the first event of a cause and its last
const KINDS = Object.keys(MARKS);
const rank = ({ kind }) => KINDS.indexOf(kind);
/** What an error that repeats has in common with its repeats. */
export const causeOf = ({ kind, device_uuid: uuid, details }) => kind + uuid + Object.fromEntries(details).limit_bytes;

/** Groups of events: those of one process within seconds, and repeats of an out-of-memory error; the one that tells most
first, by which groups are ordered. */
export function causesOf(events) {
  const groups = [];
  for (const event of [...events].sort((one, other) => other.id - one.id)) {
    const group = groups.find((each) => event.pid !== null && each[0].pid === event.pid && (each[0].at - event.at < SECONDS || each.some((later) => later.at - event.at <= REPEATS[event.kind] && causeOf(later) === causeOf(event))));
    if (group) group.push(event);
    else groups.push([event]);
  }
  for (const group of groups) group.sort((one, other) => rank(one) - rank(other));
  return groups.sort(([one], [other]) => other.id - one.id);
}
