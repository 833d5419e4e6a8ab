// Events: what happened, the newest first.

import * as address from "./address.js";
import { causesOf, timesOf } from "./eventgroups.js";
import { showMinuteBefore } from "./chart.js";
import { eventRecord, saveCsv } from "./downloads.js";
import { $, button, make, put, showChoices, sync } from "./elements.js";
import { clean, clock, words } from "./format.js";
import { showDevice } from "./shareschart.js";
import { chosen } from "./selection.js";
import { read } from "./live.js";
import { addEvents, eventsSince, processKey, state } from "./state.js";
import { REPEATS } from "./words.js";

const SHOWN = 60; // groups
const MOST = 200; // events of which groups are made, the newest

/** Kinds of events by what the user chooses to see. */
const CHOICES = {
  all: () => true,
  alerts: (kind) => /^(alert|verdict|oom|xid|device)/.test(kind),
  flushes: (kind) => kind === "flush",
  programs: (kind) => /^(agent|process|suspend|resume|wait|grant)/.test(kind),
};

const choice = () => CHOICES[$("events-of").value];

/** The events of the chosen kinds, and of a device, the chosen one by default, or of none. If it is null, of all. */
function chosenEvents(uuid = chosen()?.uuid) {
  return [...state.events.values()].filter(({ kind, device_uuid: own }) => choice()(kind) && (!uuid || !own || own === uuid));
}

let all = false; // events are listed, not only the newest

/** What is listed, the newest first: groups of events that have one cause. */
const newestGroups = (uuid) => causesOf(chosenEvents(uuid).slice(all ? 0 : -MOST)).slice(0, all ? undefined : SHOWN);

/** The most telling event of each group that is listed if no device is chosen. */
export const newestEvents = () => newestGroups(null).map(([event]) => event);

/** Shows the minute before an event in the chart of its device, or of its program's; of all if neither is known. */
export function showMinute({ at, device_uuid: uuid, ...of }) {
  const program = of.pid && [...state.frame.processes, ...state.events.values()].find((each) => each.device_uuid && processKey(each) === processKey(of));
  showDevice(state.devices.get(uuid ?? program?.device_uuid));
  showMinuteBefore(at);
}

function createGroup() {
  const node = make("li");
  const time = button("", () => showMinute(node.event), "button.plain");
  time.title = "Show the minute before it";
  time.tabIndex = -1; // the palette lists events, too
  node.append(time, make("b"), make("bdi"));
  return node;
}

function updateGroup(node, [event, ...more]) {
  node.event = event;
  node.className = clean(event.kind);
  const [time, kind, summary] = node.children;
  put(time, clock(event.at));
  put(kind, words(event.kind));
  put(summary, event.summary + timesOf({ times: REPEATS[event.kind] ? more.length + 1 : 1, last: more.at(-1)?.at }), 900);
  summary.title = [event, ...more].map((each) => clean(`${words(each.kind)}: ${each.summary}`)).join("\n");
}

export function showEvents() {
  const groups = newestGroups();
  const oldest = (group) => Math.min(...group.map(({ id }) => id));
  sync($("events"), groups, oldest, createGroup, updateGroup);
  $("no-events").hidden = groups.length > 0;
  $("events").hidden = !groups.length;
  $("events-older").hidden = all || (groups.length < SHOWN && eventsSince() === -Infinity);
}

async function showOlder() {
  const answer = await read("api/v1/events", { Accept: "application/json" });
  if (answer.ok) addEvents(await answer.json());
  all = answer.ok;
  showEvents();
}

const wanted = address.read("events");
showChoices($("events-of"), Object.keys(CHOICES).map((name) => [name]), Object.hasOwn(CHOICES, wanted) ? wanted : "all");
$("events-csv").addEventListener("click", () => saveCsv("events", chosenEvents().map(eventRecord)));
$("events-older").addEventListener("click", showOlder);
$("events-of").addEventListener("change", () => {
  address.write("events", $("events-of").value === "all" ? "" : $("events-of").value);
  if (state.frame) showEvents();
});
