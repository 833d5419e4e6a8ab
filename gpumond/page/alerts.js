// Alerts, verdicts and events.

import { $, button, make, name, named, put, sync } from "./elements.js";
import { createFit, showFit } from "./fit.js";
import { clean, clock, duration, many, words } from "./format.js";
import { silence } from "./silences.js";
import { isNote, ordinary, processKey, state } from "./store.js";
import { RUNBOOKS } from "./words.js";

const SEVERITY = { critical: 0, page: 0, warning: 1, info: 2 };
const SHOWN = 12; // alerts, and verdicts, until the user asks for all
const EVENTS_SHOWN = 60;
const LEVELS = { critical: "bad", page: "bad", info: "note" };

/** The name of a rule or a verdict; that of a built-in rule leads to its runbook. */
function title(rule) {
  const node = make(RUNBOOKS.includes(rule) ? "a" : "span");
  name(node, rule, 80);
  if (node.localName === "a") node.href = `docs/runbooks/${rule}`;
  return make("b", node);
}

function line(alert) {
  const act = button("Silence", () => silence(alert));
  const labels = Object.entries(alert.labels).filter(([label, text]) => text && ["workload", "gpu", "pid"].includes(label));
  const subject = labels.map(([label, text]) => `${label} ${text}`).join(" ");
  act.setAttribute("aria-label", clean(`Silence ${alert.rule} ${subject}`, 200).trim());
  return make("li", title(alert.rule), make("time"), make("bdi"), act, make("a", "Case"));
}

/** The link to the case file of an out-of-memory error. */
function showCase(link, id) {
  link.hidden = !id;
  if (id) link.href = `api/v1/oom/${encodeURIComponent(id)}/report`;
}

const complete = new Set(); // ids of the lists that the user asked for in full

/** The first entries of a list, and a button for the others. */
function shown(id, entries) {
  const more = $(`${id}-more`);
  more.hidden = entries.length <= SHOWN;
  put(more, complete.has(id) ? "Show fewer" : `Show all ${entries.length}`);
  return complete.has(id) ? entries : entries.slice(0, SHOWN);
}

export function showAlerts() {
  const entries = state.frame.alerts.map((alert) => ({
    ...alert,
    labels: Object.fromEntries(alert.labels),
    notes: Object.fromEntries(alert.annotations),
  }));
  const rank = (alert) => 10 * (alert.phase !== "firing") + (SEVERITY[alert.labels.severity] ?? 1);
  entries.sort((one, other) => rank(one) - rank(other) || one.active_at - other.active_at);
  const now = state.frame.snapshot.taken_at;
  sync(
    $("alerts"),
    shown("alerts", entries),
    (alert) => JSON.stringify([alert.rule, Object.entries(alert.labels)]),
    line,
    (node, alert) => {
      const firing = alert.phase === "firing";
      const silenced = alert.silenced_by.length > 0;
      node.className = firing && !silenced ? (LEVELS[alert.labels.severity] ?? "warn") : "quiet";
      const age = duration(now - (alert.fired_at ?? alert.active_at));
      put(node.children[1], `${firing ? "firing" : "pending"} for ${age}${silenced ? ", silenced" : ""}`);
      name(node.children[2], alert.notes.summary ?? "", 1000);
      showCase(node.children[4], alert.notes.case);
    },
  );
  $("no-alerts").hidden = entries.length > 0;
  const firing = entries.filter((alert) => alert.phase === "firing" && !alert.silenced_by.length).length;
  document.title = `${firing ? `(${firing}) ` : ""}gpumond ${clean(state.frame.host, 80)}`;
}

export function showVerdicts() {
  const notable = state.frame.verdicts.filter((verdict) => !ordinary(verdict));
  const left = (verdict) => verdict.time_to_oom_seconds ?? Infinity;
  notable.sort((one, other) => left(one) - left(other) || one.since - other.since);
  sync(
    $("verdicts"),
    shown("verdicts", notable),
    (verdict) => [verdict.device_uuid, processKey(verdict), verdict.kind].join(),
    (verdict) => make("li", title(verdict.kind), make("time"), make("bdi"), createFit()),
    (node, verdict) => {
      node.className = isNote(verdict) ? "note" : "warn";
      put(node.children[1], `since ${clock(verdict.since)}`);
      name(node.children[2], verdict.summary, 400);
      showFit(node.children[3], verdict, state.frame.snapshot.taken_at);
    },
  );
  const rest = state.frame.verdicts.length - notable.length;
  const healthy = `No problem found in ${many(rest, "memory curve")}.`;
  const none = rest ? healthy : "No verdicts yet: gpumond needs a few minutes of data.";
  put($("no-verdicts"), notable.length ? "" : none);
}

export function showEvents() {
  const newest = [...state.events.values()].sort((one, other) => other.id - one.id).slice(0, EVENTS_SHOWN);
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

for (const [id, show] of [["alerts", showAlerts], ["verdicts", showVerdicts]])
  $(`${id}-more`).addEventListener("click", () => {
    if (!complete.delete(id)) complete.add(id);
    show();
  });
