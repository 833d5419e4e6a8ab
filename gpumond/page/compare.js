// The view that compares programs, or moments of one: their memory on one scale, and a table of differences.

import * as address from "./address.js";
import { $, button, control, make, named, put, sync } from "./elements.js";
import { clock, human, signed } from "./format.js";
import { createTable, showTable } from "./lists.js";
import { intervals } from "./intervals.js";
import { readPast } from "./past.js";
import { createPlot, drawCursor, drawPlot } from "./plot.js";
import { layersOf } from "./stack.js";
import { addressOf, isAt, rowsOf } from "./rows.js";
import { drawing, state } from "./store.js";
import { addView, openView } from "./views.js";
import { OF_PROCESSES } from "./words.js";

const MOST = 4; // programs that are compared at once
const SECONDS = 900;

const marked = new Map(); // addresses of rows, by their key
let wanted = address.read("compare").split(",").filter(Boolean); // addresses of rows to mark in the first frame that has any
const keyOf = ({ device_uuid: uuid, pid }) => `${uuid}:${pid}`;

export const isMarked = (row) => marked.has(keyOf(row));

/** Marks the rows that the address names. */
function markWanted() {
  if (!wanted.length || !state.frame?.processes.length) return;
  const all = rowsOf(state.frame);
  const found = all.filter((row) => wanted.some((each) => isAt(each, row))).slice(0, MOST);
  for (const row of found) marked.set(keyOf(row), addressOf(row, all));
  wanted = [];
  showCount();
}

/** Marks a row for the comparison, at most four; returns whether it is marked. */
export function setMarked(row, on) {
  marked.delete(keyOf(row));
  if (on) marked.set(keyOf(row), addressOf(row, rowsOf(state.frame)));
  while (marked.size > MOST) marked.delete(marked.keys().next().value);
  address.write("compare", [...marked.values()].join(","));
  showCount();
  return on;
}

function showCount() {
  const open = $("compare-open");
  open.hidden = !marked.size;
  put(open, `Compare ${marked.size}`);
}

/** Rows of the newest frame that are marked. */
function rows() {
  markWanted();
  return state.frame.processes.filter(isMarked);
}

const COLUMNS = [
  { title: "Share", text: ({ share }) => share },
  { title: "Program", text: ({ program }) => program },
  { title: "Before", text: ({ before }) => human(before), number: true },
  { title: "Now", text: ({ now }) => human(now), number: true },
  { title: "Difference", text: ({ before, now }) => (before === undefined || now === undefined ? "-" : signed(now - before)), number: true },
];

const charts = make("div.compared");
const controls = make("div.controls");
const says = control("p", { role: "status" });
const moment = control("input", { type: "range", min: 0, max: 100, value: 0 });
const table = createTable("Differences between two moments", COLUMNS);
let histories = [];

function create() {
  moment.setAttribute("aria-label", "The moment to compare with");
  moment.addEventListener("input", show);
  const clear = button("Clear", () => {
    for (const row of rows()) setMarked(row, false);
    histories = [];
    show();
  });
  controls.append(make("label", "Compare now with ", moment), clear);
  return make("section", make("div.title", make("h2", "Compare"), says, controls), charts, table);
}

async function load() {
  const to = state.frame.snapshot.taken_at;
  const found = rows().map(async (row) => {
    const target = { uuid: row.device_uuid, pid: row.pid, start_ticks: row.start_ticks };
    const past = await readPast(target, { from: to - SECONDS, to: null }, null);
    return { row, past };
  });
  histories = await Promise.all(found);
  show();
}

const programOf = ({ workload, comm, pid }) => `${workload || comm || "?"} (pid ${pid})`;

function show() {
  const to = state.frame.snapshot.taken_at;
  const points = histories.flatMap(({ past }) => past.points);
  const from = Math.max(to - SECONDS, points.reduce((first, { at }) => Math.min(first, at), to - 1));
  const at = from + ((to - from) * moment.value) / 100;
  const top = points.reduce((most, { used }) => Math.max(most, used), 1);
  controls.hidden = !histories.length;
  put(says, histories.length ? `All charts use the scale 0 to ${human(top)}, and compare now with ${clock(at)}.` : "Mark up to four processes in the overview, with ✓ in their rows or the key x, to see their memory side by side.");
  sync(
    charts,
    histories,
    ({ row }) => keyOf(row),
    ({ row }) => {
      const plot = createPlot(`Memory of ${programOf(row)} in the last 15 min`);
      plot.tabIndex = -1; // it has no keys
      return make("div", make("h3", named(programOf(row), 80)), plot);
    },
    ({ lastChild: plot }, { past }) => {
      const columns = intervals(past.points, past.seconds, from, to).map((column) => ({ ...column, layers: layersOf(column) }));
      const view = { from, to, columns, blocks: past.seconds !== null, size: null, marks: [], spans: [], bound: null, top };
      drawPlot(plot, { ...view, summary: plot.ariaLabel });
      drawCursor(plot, view, at);
    },
  );
  const entries = histories.flatMap(({ row, past }) => differences(row, past, at));
  table.hidden = !entries.length;
  showTable(table, entries, ({ share, key }) => `${key} ${share}`);
}

/** Bytes of each share of a process at a time and now. */
function differences(row, { points }, at) {
  const before = points.findLast((point) => point.at <= at) ?? points[0];
  const now = points.at(-1);
  const names = ["used", ...OF_PROCESSES].filter((share) => before?.[share] || now?.[share]);
  return names.map((share) => ({ key: keyOf(row), share, program: programOf(row), before: before?.[share], now: now?.[share] }));
}

$("compare-open").addEventListener("click", () => openView("compare"));
showCount();
drawing.addEventListener("change", markWanted);
addView("compare", create, load);
