// The view of rules: what each compares, its state, and the editor.

import { isEnded } from "./cards.js";
import { button, make, put } from "./elements.js";
import { edit } from "./editor.js";
import { createTable, showTable } from "./viewtables.js";
import { expression, hold } from "./ruleform.js";
import { state } from "./state.js";
import { read } from "./live.js";
import { addView } from "./views.js";
import { RUNBOOKS } from "./words.js";

const NEW = { scope: "device", value: "used_ratio", above: 0.9, labels: { severity: "warning" } };

const COLUMNS = [
  { title: "Rule", text: (entry) => entry.name },
  { title: "Fires when", text: ({ rule }) => expression(rule) },
  { title: "For", text: ({ rule }) => hold(rule) },
  { title: "Severity", text: ({ rule }) => rule.labels?.severity ?? "" },
  { title: "State", text: stateOf, update: showState },
  { title: "Origin", text: originOf },
  { title: "", nodes: (row) => [button("Edit", () => open(row.item)), " ", make("a", "Runbook")], update: showActs },
];

function originOf({ origin, overrides }) {
  const fields = Object.keys(overrides);
  return fields.length ? `${origin}, overridden: ${fields.join(", ")}` : origin;
}

function stateOf({ name: own, enabled }) {
  if (!enabled) return "disabled";
  const phaseOf = ({ phase, annotations }) => (isEnded({ phase, notes: Object.fromEntries(annotations) }) ? "ended" : phase);
  const found = state.frame.alerts.filter(({ rule }) => rule === own).map(phaseOf);
  const count = (phase) => found.filter((each) => each === phase).length;
  const phases = ["firing", "pending", "ended"].filter(count).map((phase) => `${count(phase)} ${phase}`);
  return phases.join(", ") || "inactive";
}

function showState(cell, entry) {
  cell.classList.toggle("warn", stateOf(entry).includes("firing"));
}

function showActs(cell, entry) {
  const [change, runbook] = cell.children;
  change.hidden = entry.origin === "file";
  change.setAttribute("aria-label", `Edit ${entry.name}`);
  runbook.hidden = entry.origin !== "built-in" || !RUNBOOKS.includes(entry.name);
  runbook.href = `docs/runbooks/${encodeURIComponent(entry.name)}`;
  runbook.setAttribute("aria-label", `Runbook of ${entry.name}`);
}

let table;
let place; // of the editor

function open(entry) {
  edit(place, entry).catch(() => put(place, "The daemon doesn't respond."));
}

function create() {
  table = createTable("Rules", COLUMNS);
  place = make("div");
  const add = button("New rule", () => open({ name: "", origin: "", rule: NEW, enabled: true, overrides: {} }));
  return make("section", make("div.title", make("h2", "Rules"), add), place, table);
}

async function load() {
  const answer = await read("api/v1/rules");
  if (answer.ok) showTable(table, await answer.json(), (entry) => entry.name);
}

addView("rules", create, load);
