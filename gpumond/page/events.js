// Events: what happened, the newest first.

import * as address from "./address.js";
import { $, make, named, sync } from "./elements.js";
import { clean, clock, words } from "./format.js";
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

export function showEvents() {
  const own = [...state.events.values()].filter(({ kind }) => choice()(kind));
  const newest = own.sort((one, other) => other.id - one.id).slice(0, SHOWN);
  sync(
    $("events"),
    newest,
    (event) => event.id,
    (event) => make("li", make("time", clock(event.at)), make("b", clean(words(event.kind))), named(event.summary, 400)),
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
