// The view of the queue: requests for memory that wait, or are granted and not all used.

import { clock, duration, sizeText } from "./format.js";
import { holdersText } from "./shareschart.js";
import { createListing } from "./viewtables.js";
import { state } from "./state.js";
import { addView } from "./views.js";

const now = () => state.frame.snapshot.taken_at;
const bytes = (field) => (each) => (each[field] === undefined ? "" : sizeText(each[field] === null ? null : Math.max(0, each[field])));
/** What flushes return before the request is granted, with which the other amounts add up. */
const flushed = ({ need_bytes: need, available_bytes: available, missing_bytes: missing }) => ((available ?? -1) < 0 ? "" : sizeText(Math.max(0, need - available - missing)));
const nameOf = ({ workload, pid }) => [workload, pid === null ? "" : `pid ${pid}`].filter(Boolean).join(", ");
const stateOf = ({ unused_bytes: unused }) => (unused ? `granted, ${sizeText(unused)} not used yet` : "waiting");

/** The programs whose turn is before a request's. */
const ahead = ({ device_uuid: uuid, ahead: count }) =>
  state.frame.queue.filter((each) => each.device_uuid === uuid && each.ahead < count).map(nameOf).join("; ");

const COLUMNS = [
  { title: "Program", text: nameOf, name: true },
  { title: "State", text: stateOf },
  { title: "GPU", text: ({ device_uuid: uuid }) => String(state.devices.get(uuid)?.index ?? "?"), number: true },
  { title: "Needs", text: bytes("need_bytes"), number: true },
  { title: "Available", text: bytes("available_bytes"), number: true },
  { title: "Flushes return", text: flushed, number: true },
  { title: "Missing", text: bytes("missing_bytes"), number: true },
  { title: "Since", text: ({ since }) => (since ? `${clock(since, now())}, for ${duration(Math.max(0, now() - since))}` : "") },
  { title: "Behind", text: ahead, none: "No other request comes first." },
  { title: "Largest programs", text: ({ holders = [] }) => holdersText(holders), long: true },
];

const record = ({ holders = [], ...request }) => ({ ...request, state: stateOf(request), holders: holdersText(holders) });
const NONE = "No program is waiting for memory. To start one once its memory is free: gpumond run --need SIZE --wait 10m -- COMMAND";
let section;

async function load() {
  const { queue, grants } = state.frame;
  section.show([...queue, ...grants]);
}

const create = () => {
  const device = state.devices.size > 1 ? " --need-device GPU" : "";
  return (section = createListing("Queue", COLUMNS, ({ id }) => id, record, NONE.replace("SIZE", `$&${device}`)));
};

addView("queue", create, load);
