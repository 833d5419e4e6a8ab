// The command palette: jumps to devices, programs and views, and actions, found by their words.

import { showRange } from "./chart.js";
import { isMarked, setMarked } from "./marked.js";
import { $, control, named, put } from "./elements.js";
import { newestEvents, showMinute } from "./events.js";
import { flush } from "./flush.js";
import { clean, clock } from "./format.js";
import { expire, matchersOf } from "./silences.js";
import { showDevice } from "./hero.js";
import { choose } from "./selection.js";
import { cardCommands } from "./problems.js";
import { CHART_RANGES } from "./range.js";
import { COLUMNS, GROUPS, rowsOf } from "./rows.js";
import { allowsFlush, hasAgent, hasPools, label, reclaimableOf, state } from "./state.js";
import { wordOf } from "./suspend.js";
import { filterBy, groupBy, showProcess, sortById, suspendRow } from "./table.js";
import { setTheme, themes } from "./theme.js";
import { TITLES, openView, why } from "./views.js";
import { RUNBOOKS } from "./words.js";

const SHOWN = 50;
const BUTTONS = ["pause", "link", "help-open", "sign"]; // of the header: each is a command, too

let commands = []; // pairs of a text and an action
let found = [];
let active = 0; // place of the selected one

function* commandsOf() {
  for (const [name, title] of Object.entries(TITLES)) yield [`View ${title}`, () => openView(name)];
  yield ["Who waits for memory: queue", () => openView("queue")];
  for (const id of BUTTONS) yield [$(id).textContent, () => $(id).click()];
  for (const theme of themes) yield [`Theme ${theme}`, () => setTheme(theme)];
  if (!state.frame) return;
  yield* cardCommands();
  const { devices } = state.frame.snapshot;
  const rows = rowsOf(state.frame);
  for (const row of rows) yield [`Show ${subjectOf(row)}`, () => visit(() => showProcess(row.key))];
  for (const kind of ["csv", "json"]) yield [`Download processes as ${kind.toUpperCase()}`, () => $(kind).click()];
  if (devices.length > 1) yield ["Show all GPUs", () => visit(() => choose(null))];
  if (rows.some(hasAgent)) yield ["Flush all programs", () => flush({ all: true }, "all programs")];
  for (const device of devices) {
    yield [`Show ${label(device)} ${device.name}`, () => visit(() => showDevice(device))];
    if (reclaimableOf([device]).bytes) yield [`Flush ${label(device)}`, () => flush({ device: device.uuid }, label(device))];
  }
  for (const row of rows.filter((row) => allowsFlush(row) && row.cached_bytes))
    yield [`Flush ${subjectOf(row)}`, () => flush({ pid: row.pid, start_ticks: row.start_ticks }, subjectOf(row))];
  for (const row of rows.filter(hasPools)) yield [`Why ${subjectOf(row)}`, () => why(row.pid, subjectOf(row))];
  for (const row of rows.filter(({ suspension, suspendable }) => suspension || suspendable))
    yield [`${wordOf(row)} ${subjectOf(row)}`, () => visit(() => suspendRow(row.key))];
  for (const row of rows.filter(({ device }) => device))
    yield [`${isMarked(row) ? "Remove from comparison" : "Compare"} ${subjectOf(row)}`, () => setMarked(row, !isMarked(row))];
  for (const name of RUNBOOKS) yield [`Runbook ${name}`, () => location.assign(`docs/runbooks/${name}`)];
  for (const { id, title } of COLUMNS) yield [`Sort by ${title.toLowerCase()}`, () => visit(() => sortById(id))];
  for (const name of ["", ...Object.keys(GROUPS)]) yield [`Group by ${name || "nothing"}`, () => visit(() => groupBy(name))];
  for (const [text, seconds] of CHART_RANGES) yield [`Range ${text}`, () => visit(() => showRange(seconds))];
  for (const silence of state.frame.silences) yield [`End the silence for ${matchersOf(silence)}`, () => expire(silence.id)];
  for (const event of newestEvents()) yield [`Minute before ${clock(event.at)} ${event.summary}`, () => visit(() => showMinute(event))];
}

const subjectOf = ({ program, pid, device }) => `${program} (pid ${pid})${device ? ` on ${label(device)}` : ""}`;

/** Shows the present state, and then something of it. */
function visit(show) {
  openView("");
  show();
}

function search() {
  const terms = $("palette-text").value.toLowerCase().split(/\s+/).filter(Boolean);
  const starts = ([text]) => text.toLowerCase().startsWith(terms[0] ?? "");
  const matching = commands.filter(([text]) => terms.every((term) => text.toLowerCase().includes(term)));
  found = matching.sort((one, other) => starts(other) - starts(one)).slice(0, SHOWN);
  const words = $("palette-text").value.trim();
  if (!found.length && state.frame) found = [[`Filter processes by ${words}`, () => visit(() => filterBy(words))]];
  $("palette-list").replaceChildren(
    ...found.map(([text, act], place) => {
      const option = control("li", { role: "option", id: `command-${place}` }, named(text, 200));
      option.addEventListener("click", () => run(act));
      return option;
    }),
  );
  put($("palette-count"), found.length ? "" : "No matching command.");
  select(0);
}

function select(place) {
  active = Math.max(0, Math.min(place, found.length - 1));
  [...$("palette-list").children].forEach((option, at) => option.setAttribute("aria-selected", String(at === active)));
  $("palette-list").children[active]?.scrollIntoView({ block: "nearest" });
  $("palette-text").setAttribute("aria-activedescendant", found.length ? `command-${active}` : "");
}

function run(act) {
  $("palette").close();
  act();
}

const KEYS = {
  ArrowDown: () => select(active + 1),
  ArrowUp: () => select(active - 1),
  Home: () => select(0),
  End: () => select(found.length - 1),
  Enter: () => found.length && run(found[active][1]),
};

function create() {
  const text = control("input", { type: "text", role: "combobox", id: "palette-text", autocomplete: "off", spellcheck: false });
  text.setAttribute("aria-label", "Command");
  text.setAttribute("aria-expanded", "true");
  text.setAttribute("aria-autocomplete", "list");
  text.setAttribute("aria-controls", "palette-list");
  const list = control("ul", { role: "listbox", id: "palette-list", ariaLabel: "Commands" });
  const count = control("p", { role: "status", id: "palette-count" });
  const dialog = control("dialog", { id: "palette", ariaLabel: "Commands" }, text, list, count);
  text.addEventListener("input", search);
  text.addEventListener("keydown", (event) => {
    if (!KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  document.body.append(dialog);
}

function open() {
  if (document.querySelector("dialog[open]")) return;
  if (!$("palette")) create();
  commands = [...commandsOf()].map(([text, act]) => [clean(text, 200), act]);
  $("palette-text").value = "";
  $("palette").showModal();
  search();
}

$("palette-open").addEventListener("click", open);
document.addEventListener("keydown", (event) => {
  const chord = event.key === "k" && (event.ctrlKey || event.metaKey) && !event.altKey;
  const colon = event.key === ":" && !event.target.closest("input, select, textarea, dialog");
  if (!chord && !colon) return;
  event.preventDefault();
  open();
});
