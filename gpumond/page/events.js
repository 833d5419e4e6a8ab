// Events: what happened, the newest first.

import * as address from "./address.js";
import { showMinuteBefore } from "./chart.js";
import { $, button, make, named, sync } from "./elements.js";
import { clean, clock, words } from "./format.js";
import { showDevice } from "./hero.js";
import { state } from "./store.js";

const SHOWN = 60;

/** Kinds of events by what the user chooses to see. */
const CHOICES = {
  all: () => true,
  alerts: (kind) => /^(alert|verdict|oom|xid)/.test(kind),
  flushes: (kind) => kind === "flush",
  programs: (kind) => /^(agent|process)/.test(kind),
};

const choice = () => CHOICES[$("events-of").value];

/** The events that are listed, the newest first. */
export function newestEvents() {
  const own = [...state.events.values()].filter(({ kind }) => choice()(kind));
  return own.sort((one, other) => other.id - one.id).slice(0, SHOWN);
}

/** Shows the minute before an event in the chart of its device. */
export function showMinute({ at, device_uuid: uuid }) {
  const device = state.devices.get(uuid);
  if (device) showDevice(device);
  else $("hero").scrollIntoView({ block: "nearest" });
  showMinuteBefore(at);
}

function createEvent(event) {
  const time = button(clock(event.at), () => showMinute(event), "button.plain");
  time.title = "Show the minute before it";
  time.tabIndex = -1; // the palette lists events, too
  return make("li", time, make("b", clean(words(event.kind))), named(event.summary, 400));
}

export function showEvents() {
  const newest = newestEvents();
  sync(
    $("events"),
    newest,
    (event) => event.id,
    createEvent,
    (node, event) => {
      node.className = clean(event.kind);
    },
  );
  $("no-events").hidden = newest.length > 0;
  $("events").hidden = !newest.length;
}

$("events-of").append(...Object.keys(CHOICES).map((name) => Object.assign(make("option", name), { value: name })));
$("events-of").value = Object.hasOwn(CHOICES, address.read("events")) ? address.read("events") : "all";
$("events-of").addEventListener("change", () => {
  address.write("events", $("events-of").value === "all" ? "" : $("events-of").value);
  if (state.frame) showEvents();
});
