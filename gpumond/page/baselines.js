// The view of baselines: recorded memory use, which is recorded, deleted and compared.

import { curves } from "./curves.js";
import { button, choice, control, labeled, make, named, put, svg } from "./elements.js";
import { clean, clock, duration, sizeText, percent } from "./format.js";
import { createTable, showTable } from "./viewtables.js";
import { attempt } from "./session.js";
import { state } from "./state.js";
import { read } from "./live.js";
import { addView, reload } from "./views.js";

const NOW = ""; // the value of a new measurement in the choice of what to compare with
const NONE = { differences: [], curves: [] };
const UNITS = { s: 1, m: 60, h: 3600 };

const COLUMNS = [
  { title: "Baseline", text: ({ name }) => name },
  { title: "Workloads", text: ({ workload, workloads }) => workload ?? workloads.join(", ") },
  { title: "Recorded", text: ({ started_at: at }) => new Date(1000 * at).toLocaleString([], { hour12: false }) },
  { title: "State", text: stateOf },
  { title: "", nodes: createActs, update: showActs },
];

const signed = (text, value) => (value > 0 ? `+${text}` : text);

function valueText({ measure }, value) {
  if (value === null) return "-";
  if (measure === "utilization") return percent(value, 1);
  return measure === "retries" ? `${Number(value.toPrecision(3))} per hour` : sizeText(value);
}

const signedText = (each, value) => signed(valueText(each, value), value);
const measureText = ({ measure, stat }) => [measure.replace("_", " "), stat !== "rate" && stat].filter(Boolean).join(" ");

const DIFFERENCES = [
  { title: "Workload", text: ({ workload }) => workload },
  { title: "Measure", text: measureText },
  { title: "Before", text: (each) => valueText(each, each.before), number: true },
  { title: "After", text: (each) => valueText(each, each.after), number: true },
  { title: "Difference", text: (each) => signedText(each, each.difference), number: true },
  { title: "Change", text: ({ ratio }) => (ratio === null ? "-" : signed(percent(ratio, 1), ratio)), number: true },
  { title: "95% interval", text: intervalOf, number: true },
];

function stateOf({ complete, seconds, for_seconds: whole }) {
  return complete ? `complete, ${duration(whole)}` : `recording, ${duration(seconds)} of ${duration(whole)}`;
}

function intervalOf(each) {
  return each.low === null ? "-" : `${signedText(each, each.low)} to ${signedText(each, each.high)}`;
}

function createActs(row) {
  return [button("Compare", () => open(row.item)), " ", button("Delete", () => remove(row.item))];
}

function showActs(cell, entry) {
  const [look, erase] = cell.children;
  look.disabled = !entry.complete;
  look.setAttribute("aria-label", `Compare ${entry.name}`);
  erase.setAttribute("aria-label", `Delete ${entry.name}`);
}

const ABOUT = "Record your programs' memory use, and compare it after a change.";
const routeOf = ({ name }) => `baselines/${encodeURIComponent(name)}`;
const refusal = control("p", { role: "alert", className: "refused" });
const table = createTable("Baselines", COLUMNS);
const panel = make("div");
let entries = [];
let compared = null; // the entry in the panel

async function act(method, route, body) {
  const answer = await attempt(method, route, body);
  put(refusal, answer?.detail ?? "", 600);
  if (answer?.ok) reload();
  return answer?.ok;
}

function remove(entry) {
  if (confirm(`Delete the baseline ${clean(entry.name, 80)}?`)) act("DELETE", routeOf(entry));
}

/** Seconds of a duration such as `30s`, `10m` or `1h`. */
function secondsOf(text) {
  const [, number, unit] = /^(\d+)([smh])$/.exec(text);
  return number * UNITS[unit];
}

function createForm() {
  const input = (properties) => control("input", { type: "text", required: true, autocomplete: "off", ...properties });
  const name = input({ pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}", title: "at most 64 of A-Z, a-z, 0-9, '.', _ and -" });
  const length = input({ value: "10m", pattern: "[1-9][0-9]{0,4}[smh]", title: "such as 30s, 10m or 1h" });
  const workload = input({ required: false, placeholder: "all" });
  const submit = control("button", { type: "submit", className: "strong" }, "Record");
  const labels = [labeled("Name", name), labeled("Duration", length), labeled("Workload", workload)];
  const form = make("form.fields", ...labels, submit);
  form.setAttribute("aria-label", "Record a baseline");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const only = workload.value.trim() ? { workload: workload.value.trim() } : {};
    if (await act("PUT", routeOf({ name: name.value }), { for_seconds: secondsOf(length.value), ...only })) name.value = "";
  });
  return form;
}

/** Shows the panel that compares a baseline with another one, or with a new measurement. */
function open(entry) {
  compared = entry;
  const others = entries.filter(({ name, complete }) => complete && name !== entry.name).map(({ name }) => [name]);
  const after = choice([[NOW, "a new measurement"], ...others]);
  const body = { for_seconds: entry.for_seconds };
  const measure = button("Measure now", () => act("POST", `${routeOf(entry)}/compare`, body));
  const says = control("p", { role: "status" });
  const differences = createTable("Differences", DIFFERENCES);
  const drawn = make("div.curves");
  const title = make("div.title", make("h3", "Compare ", named(entry.name, 80)));
  title.append(make("div.controls", labeled("with", after), measure, button("Close", close)));
  panel.replaceChildren(title, says, drawn, differences);
  differences.hidden = true;
  after.addEventListener("change", reload);
  let shown = null; // baselines do not change: their differences are computed once
  panel.update = async () => {
    if (after.value !== NOW && after.value === shown) return;
    shown = after.value;
    measure.hidden = shown !== NOW;
    const found = after.value === NOW ? await measured(entry) : await recorded(entry, after.value);
    if (compared !== entry) return;
    put(says, found.text, 600);
    differences.hidden = !found.differences.length;
    showTable(differences, found.differences, ({ workload, measure: kind, stat }) => [workload, kind, stat].join());
    drawn.replaceChildren(...found.curves.map(curveOf));
  };
  reload();
}

function close() {
  compared = null;
  panel.replaceChildren();
}

/** The comparison with the newest measurement. */
async function measured(entry) {
  const answer = await read(`api/v1/${routeOf(entry)}/compare`);
  const found = await answer.json();
  if (!answer.ok) return { ...NONE, text: "Nothing to compare with yet: start a measurement." };
  const { after_started_at: at, after_seconds: seconds, complete } = found;
  const length = complete ? `for ${duration(seconds)}` : `for ${duration(seconds)} of ${duration(entry.for_seconds)} so far`;
  const text = `Measured since ${clock(at, state.frame.snapshot.taken_at)} ${length}.`;
  return { ...NONE, text, differences: found.differences };
}

async function recorded(entry, name) {
  const routes = [routeOf(entry), routeOf({ name }), `${routeOf(entry)}/compare?with=${encodeURIComponent(name)}`];
  const [before, after, { differences }] = await Promise.all(
    routes.map(async (route) => {
      const answer = await read(`api/v1/${route}`);
      const found = await answer.json();
      return answer.ok ? found : Promise.reject(new Error(found.detail));
    }),
  );
  const text = `${entry.name} for ${duration(before.seconds)}, ${name} for ${duration(after.seconds)}.`;
  return { text, differences, curves: curves(before, after) };
}

function curveOf({ workload, top, before, after }) {
  const label = clean(`Used memory of ${workload}, before and after`, 200);
  const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": label });
  drawing.append(svg("path", { class: "before", d: before }), svg("path", { class: "after", d: after }));
  const keys = ["before", "after"].map((side) => make("span", make(`i.${side}`), side));
  return make("div", make("div.keys", named(workload, 80), ...keys), make("div.plot", drawing, make("span.top", sizeText(top))));
}

const create = () => make("section", make("div.title", make("h2", "Baselines"), make("p", ABOUT)), createForm(), refusal, table, panel);

async function load() {
  const answer = await read("api/v1/baselines");
  if (!answer.ok) return;
  entries = await answer.json();
  table.hidden = !entries.length;
  showTable(table, entries, ({ name }) => name);
  if (compared) await panel.update();
}

addView("baselines", create, load);
