// The view that compares programs with one another, and each with a moment of its past, on one scale.

import * as address from "./address.js";
import { button, choice, control, make, named, put, showChoices, sync } from "./elements.js";
import { capital, clean, clock, difference, human } from "./format.js";
import { createTable, showTable } from "./lists.js";
import { earlierLives } from "./previousprocesses.js";
import { intervals } from "./intervals.js";
import { readPast } from "./history.js";
import { createPlot, drawCursor, drawPlot } from "./plot.js";
import { layersOf } from "./stack.js";
import { MOST, isMarked, mark, markedRows } from "./marked.js";
import { addressOf, isAt, rowsOf } from "./rows.js";
import { addShares } from "./shares.js";
import { label, state } from "./state.js";
import { addView } from "./views.js";
import { OF_PROCESSES } from "./words.js";

const OFFERED = 200; // programs, those that use most
const SECONDS = 900;
const SETTLED = 60; // seconds after the first value with which now is compared first: most programs have started
const NAMES = ["used", ...OF_PROCESSES];

let moment = Number(address.read("moment")); // unix time to compare now with; 0 until the user chooses one
let histories = []; // rows with their points, and ends of earlier processes of their workloads
let shown = []; // the range of the charts

const programOf = ({ program, pid }) => `${program} (pid ${pid})`;

const MOMENTS = [
  { title: "Share", nodes: () => [make("i"), make("bdi")], update: showShare },
  { title: "Program", text: ({ program }) => program },
  { title: "Before", text: ({ before }) => human(before), number: true },
  { title: "Now", text: ({ now }) => human(now), number: true },
  { title: "Difference", text: ({ before, now }) => difference(now, before), number: true },
];

function showShare(cell, { share }) {
  cell.firstChild.className = share;
  put(cell.lastChild, share);
}

/** A column for each program, and for each but the first one another with its difference from the first. */
function columnsOf(rows) {
  const of = (row) => ({ title: clean(programOf(row), 60), text: ({ values }) => human(values[row.key]), number: true });
  const from = (row) => ({
    title: rows.length > 2 ? `less ${clean(rows[0].program, 40)}` : "Difference",
    text: ({ values }) => difference(values[row.key], values[rows[0].key]),
    number: true,
  });
  return [MOMENTS[0], ...rows.flatMap((row, place) => (place ? [of(row), from(row)] : [of(row)]))];
}

const chosen = make("span.chosen");
const offer = choice([]);
const charts = make("div.compared");
const empty = make(
  "div.editor",
  make("p", "Compare shows two to four programs on one scale, and how each has changed since a moment of the last 15 min. Choose them above, or in the overview with ✓ in their rows or the key x."),
  button("Compare the two that use most", () => choose([...offer.options].slice(1, 3).map(({ value }) => value))),
);
const slider = make("label", "Compare now with ");
const says = control("p", { role: "status" });
const range = control("input", { type: "range", min: 0, max: 100 });
const time = make("time");
const since = make("h3");
const moments = createTable("Differences between two moments", MOMENTS);
let programs = createTable("Differences between programs", []);

function create() {
  offer.ariaLabel = "Add a program";
  offer.addEventListener("change", () => choose([...markedRows(), offer.value]));
  range.ariaLabel = "The moment to compare with";
  range.addEventListener("input", () => setMoment(shown[0] + ((shown[1] - shown[0]) * range.value) / 100));
  slider.append(range, " ", time);
  const title = make("div.title", make("h2", "Compare"), chosen, offer, says, make("div.controls", slider));
  const parts = [make("div.part", make("h3", "Between programs, now"), programs), make("div.part", since, moments)];
  parts.forEach((part) => (part.hidden = true));
  return make("section", title, empty, charts, make("div.compared", ...parts));
}

function choose(addresses) {
  mark(addresses);
  load();
}

function setMoment(at) {
  moment = Math.round(at);
  address.write("moment", moment);
  show();
}

async function load() {
  const now = state.frame.snapshot.taken_at;
  const from = now - SECONDS;
  const all = rowsOf(state.frame);
  const rows = [...new Set(markedRows().flatMap((each) => all.filter((row) => isAt(each, row))))].slice(0, MOST);
  showChosen(all);
  histories = await Promise.all(
    rows.map(async (row) => {
      const lives = earlierLives(row, from);
      const pasts = await Promise.all([...lives, row].map(({ pid, start_ticks }) => readPast({ uuid: row.device_uuid, pid, start_ticks }, { from, to: null }, null)));
      const points = pasts.flatMap((past, place) => past.points.map((point) => ({ ...point, pid: (lives[place] ?? row).pid }))).filter((point) => point.at < now);
      if (row.used_bytes !== null) points.push(addShares({ pid: row.pid, at: now, low: row.used_bytes, high: row.used_bytes, used: row.used_bytes }, row));
      return { row, lives, points, seconds: pasts.at(-1).seconds };
    }),
  );
  show();
}

/** The programs that are compared, each with a button that removes it, and those that can be added. */
function showChosen(all) {
  const found = (each) => all.find((row) => isAt(each, row));
  sync(
    chosen,
    markedRows(),
    (each) => each,
    (each) => make("span", named(found(each)?.program ?? each, 60), button("✕", () => choose(markedRows().filter((other) => other !== each)), "button.plain")),
    (node, each) => (node.lastChild.ariaLabel = `Remove ${clean(found(each)?.program ?? each, 60)}`),
  );
  const others = all.filter((row) => row.device && !isMarked(row)).sort((one, other) => other.used_bytes - one.used_bytes);
  const texts = others.slice(0, OFFERED).map((row) => [addressOf(row, all), `${clean(programOf(row), 80)} on ${label(row.device)}`]);
  showChoices(offer, [["", "Add a program…"], ...texts], "");
  offer.hidden = markedRows().length >= MOST || !others.length;
}

function show() {
  const to = state.frame.snapshot.taken_at;
  const points = histories.flatMap((each) => each.points);
  const from = Math.max(to - SECONDS, points.reduce((first, { at }) => Math.min(first, at), to - 1));
  const at = Math.min(Math.max(moment || Math.min(from + SETTLED, (from + to) / 2), from), to);
  const top = 1.05 * points.reduce((most, { used }) => Math.max(most, used), 1); // the highest is below the edge
  shown = [from, to];
  range.value = (100 * (at - from)) / (to - from);
  slider.hidden = !histories.length;
  put(time, clock(at));
  put(since, `Between ${clock(at)} and now`);
  put(says, histories.length ? "All charts have the same scale. Click one to choose a moment." : "");
  empty.hidden = histories.length > 0;
  sync(
    charts,
    histories,
    ({ row }) => row.key,
    ({ row }) => {
      const plot = createPlot(`Memory of ${clean(programOf(row), 80)} in the last 15 min`);
      plot.tabIndex = -1; // it has no keys
      plot.addEventListener("click", ({ offsetX }) => setMoment(shown[0] + ((shown[1] - shown[0]) * offsetX) / plot.clientWidth));
      return make("div", make("h3", named(programOf(row), 80)), make("p.quiet"), plot);
    },
    ({ children: [, note, plot] }, { row: { started_at: started }, lives, points: own, seconds }) => {
      put(note, capital(lives.map((life) => `pid ${life.pid} until ${clock(life.at)}`).join(", ")));
      const columns = intervals(own, seconds, from, to).map((column) => ({ ...column, layers: layersOf(column) }));
      const view = { from, to, started, starter: "process", columns, blocks: seconds !== null, size: null, marks: [], spans: [], bound: null, top };
      drawPlot(plot, { ...view, summary: plot.ariaLabel });
      drawCursor(plot, view, at);
    },
  );
  showTables(at);
}

function showTables(at) {
  const rows = histories.map(({ row }) => row);
  const key = rows.map((row) => row.key + row.program).join();
  if (programs.key !== key) {
    const table = Object.assign(createTable("Differences between programs", columnsOf(rows)), { key });
    programs.replaceWith(table);
    programs = table;
  }
  programs.parentNode.hidden = rows.length < 2;
  programs.parentNode.classList.toggle("whole", rows.length > 2);
  const valueOf = (row, share) => row[`${share}_bytes`] ?? undefined;
  const compared = NAMES.map((share) => ({ share, values: Object.fromEntries(rows.map((row) => [row.key, valueOf(row, share)])) }));
  showTable(programs, compared.filter(({ values }) => Object.values(values).some(Boolean)), ({ share }) => share);
  const entries = histories.flatMap(({ row, points }) => changes(row, points, at));
  moments.parentNode.hidden = !entries.length;
  showTable(moments, entries, (each) => `${each.key} ${each.share}`);
}

/** Bytes of each share of a process at a time and now. */
function changes(row, points, at) {
  const before = points.findLast((point) => point.at <= at); // none if the program began later
  const now = points.at(-1);
  const names = NAMES.filter((share) => before?.[share] || now?.[share]);
  const program = before && before.pid !== row.pid ? `${row.program} (pid ${before.pid}, now ${row.pid})` : programOf(row);
  return names.map((share) => ({ key: row.key, share, program, before: before?.[share], now: now?.[share] }));
}

addView("compare", create, load);
