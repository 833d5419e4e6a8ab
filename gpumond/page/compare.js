// The view that compares programs with one another, and two moments of each, on one scale.

import * as address from "./address.js";
import { $, button, choice, control, make, named, put, showChoices, svg, sync } from "./elements.js";
import { capital, clean, clock, sizeText, signed } from "./format.js";
import { createTable, showTable } from "./viewtables.js";
import { earlierLives } from "./previousprocesses.js";
import { intervals, runs } from "./intervals.js";
import { holdingsAt, readPast } from "./history.js";
import { createPlot, drawCursor, drawPlot, drawSelection } from "./plot.js";
import { layersOf } from "./sharelayers.js";
import { MOST, isMarked, mark, markedRows } from "./markedrows.js";
import { addressOf, isAt, rowsOf } from "./processlist.js";
import { addShares } from "./shares.js";
import { label, processKey, state } from "./state.js";
import { addView } from "./views.js";
import { ENDED, OF_PROCESSES } from "./words.js";

const OFFERED = 200; // programs, those that use most
const SECONDS = 900;
const SETTLED = 60; // seconds after the first value with which now is compared first: most programs have started
const PLAIN = { size: null, marks: [], spans: [], bound: null }; // charts
const NAMES = ["used", ...OF_PROCESSES];
const NOTHING = Object.fromEntries(NAMES.map((share) => [share, 0]));

const moments = { moment: Number(address.read("moment")), until: Number(address.read("until")) }; // unix times that are compared; 0 until the user chooses one
const linked = Math.max(0, Math.min(moments.moment || Infinity, moments.until || Infinity) - SETTLED); // the charts show what a link states
let histories = []; // rows with their points, and ends of earlier processes of their workloads
let shown = []; // the range of the charts
let holdings = new Map(); // what was held at the moments that are compared, by Unix time
let wanted = null; // moments that the tables show next
let reading = false;

const programOf = ({ program, pid }) => (pid ? `${program} (pid ${pid})` : program);

/** The last process at an address that ended after a time, as a row: what was compared stays. */
function endedAt(each, from) {
  const ended = [...state.events.values()].filter(({ kind, at }) => kind === ENDED && at > from);
  const rows = ended.map((event) => ({ ...event, key: `${event.device_uuid},${processKey(event)}`, device: state.devices.get(event.device_uuid), program: event.workload || `pid ${event.pid}`, used_bytes: 0, ended: event.at }));
  return rows.filter((row) => isAt(each, row)).slice(-1);
}

const CHANGES = [
  { title: "Share", nodes: () => [make("i"), make("bdi")], update: showShare },
  { title: "Program", text: ({ program }) => program },
  { title: "Before", text: ({ before }) => sizeText(before), number: true },
  { title: "After", text: ({ after }) => sizeText(after), number: true },
  { title: "Difference", text: ({ before, after }) => signed(after - before), number: true },
];

function showShare(cell, { share }) {
  cell.firstChild.className = share;
  put(cell.lastChild, share);
}

/** A column for each program, and for each but the first one another with its difference from the first. */
function columnsOf(rows) {
  const less = rows.length > 2 ? `less ${clean(rows[0].program, 40)}` : "Difference";
  const columns = rows.flatMap((row, place) => [
    { title: clean(programOf(row), 60), text: ({ values }) => sizeText(values[place]), number: true },
    { title: less, text: ({ values }) => signed(values[place] - values[0]), number: true },
  ]);
  return [CHANGES[0], ...columns.filter((_, place) => place !== 1)];
}

const chosen = make("span.chosen");
const offer = choice([]);
const overlay = createPlot("Used memory of the programs");
const together = make("div.compared", make("div.whole", make("h3", "Used memory"), overlay));
const charts = make("div.compared");
const empty = make(
  "div.editor",
  make("p", "Compare shows two to four programs on one scale, and how each has changed between two moments. Choose them above, or with ✓ or the x key in the overview."),
  button("Compare the two largest programs", () => choose([...offer.options].slice(1, 3).map(({ value }) => value))),
);
const controls = make("div.controls", make("p", "Click a chart for the first moment, Shift-click for the second, or type a time."), createMoment("Compare", "moment", "The first moment"), createMoment("with", "until", "The second moment"));
const of = make("h3");
const since = make("h3");
const changed = createTable("Differences between two moments", CHANGES);
let programs = createTable("Differences between programs", []);

function create() {
  offer.ariaLabel = "Add a program";
  offer.addEventListener("change", () => choose([...markedRows(), offer.value]));
  const title = make("div.title", make("h2", "Compare"), chosen, offer, controls);
  const parts = [make("div.part", of, programs), make("div.part", since, changed)];
  parts.forEach((part) => (part.hidden = true));
  choosesMoment(overlay);
  return make("section", title, empty, together, make("div.compared", ...parts), charts);
}

/** The choice of one of the moments that are compared: a slider, and a field for the time. */
function createMoment(text, name, ariaLabel) {
  const slider = control("input", { type: "range", ariaLabel, oninput: () => setMoment(name, Number(slider.value)) });
  const field = control("input", { id: `${name}-at`, size: 8, ariaLabel, onfocus: () => field.select() });
  field.onchange = () => {
    const text = field.value;
    show(); // until now, also in a field that has lost the focus
    const at = timeOf(text);
    const inside = at >= shown[0] && at <= shown[1];
    field.setCustomValidity(inside ? "" : `Type a time from ${shown.map((each) => clock(each)).join(" to ")}, or now.`);
    field.value = inside ? setMoment(name, at) : text;
    return field.reportValidity();
  };
  field.addEventListener("keydown", ({ key }) => {
    if (key === "Enter" && field.onchange()) name === "moment" ? $("until-at").focus() : field.blur();
  });
  return make("span", `${text} `, slider, field);
}

/** The last time before the end of the charts that a text such as `17:42:31`, `174231` or `17:42` states. */
function timeOf(text) {
  if (text === "now") return shown[1];
  const [, hours, minutes, seconds = 0] = /^(\d\d?):?(\d\d):?(\d\d)?$/.exec(text) ?? [];
  const at = new Date(1000 * shown[1]).setHours(hours, minutes, seconds) / 1000;
  return at > shown[1] ? at - 86400 : at;
}

const momentText = (at) => (at < shown[1] ? clock(at) : "now");

function showMoment({ children: [slider, field] }, at) {
  Object.assign(slider, { min: shown[0], max: shown[1], value: at });
  if (document.activeElement !== field) field.value = momentText(at);
}

/** Makes a click choose the first moment, and a click with Shift the second. */
function choosesMoment(plot) {
  plot.tabIndex = -1; // it has no keys
  plot.addEventListener("click", ({ offsetX, shiftKey }) => setMoment(shiftKey ? "until" : "moment", shown[0] + ((shown[1] - shown[0]) * offsetX) / plot.clientWidth));
}

function choose(addresses) {
  mark(addresses);
  load();
}

/** The end of the range is now, also later. Returns the moment's text. */
function setMoment(name, at) {
  moments[name] = at < shown[1] ? Math.round(at) : 0;
  address.write(name, moments[name] || "");
  show();
  return momentText(at);
}

async function load() {
  for (const name in moments) address.write(name, moments[name] || ""); // also after another view
  const now = state.frame.snapshot.taken_at;
  const from = Math.min(now - SECONDS, linked);
  const all = rowsOf(state.frame);
  const rowsAt = (each) => {
    const found = all.filter((row) => isAt(each, row));
    return found.length ? found : endedAt(each, from);
  };
  const rows = [...new Set(markedRows().flatMap(rowsAt))].slice(0, MOST);
  showChosen(all, rows);
  histories = await Promise.all(
    rows.map(async (row) => {
      const lives = earlierLives(row, from);
      const pasts = await Promise.all([...lives, row].map(({ pid, start_ticks }) => readPast({ uuid: row.device_uuid, pid, start_ticks }, { from, to: null }, null)));
      const points = pasts.flatMap((past, place) => past.points.map((point) => ({ ...point, pid: (lives[place] ?? row).pid }))).filter((point) => point.at < now);
      const used = row.used_bytes;
      const last = { pid: row.pid, at: row.ended ?? now, low: used, high: used, used };
      if (used !== null) points.push(addShares(last, row));
      return { row, place: markedRows().findIndex((each) => isAt(each, row)), lives, points, seconds: pasts.at(-1).seconds };
    }),
  );
  show();
}

/** A piece of a program's line. */
function sample() {
  const drawing = svg("svg", { viewBox: "0 0 24 4", "aria-hidden": "true" });
  drawing.append(svg("path", { d: "M0 2H24" }));
  return drawing;
}

/** The programs that are compared, each with a button that removes it, and those that can be added. */
function showChosen(all, rows) {
  const nameOf = (each) => rows.find((row) => isAt(each, row))?.program ?? each;
  sync(
    chosen,
    markedRows(),
    (each) => each,
    (each) => make("span", sample(), named(nameOf(each), 60), button("✕", () => choose(markedRows().filter((other) => other !== each)), "button.plain")),
    (node, each) => {
      node.lastChild.ariaLabel = `Remove ${clean(nameOf(each), 60)}`;
      node.querySelector("path").setAttribute("class", `series series-${markedRows().indexOf(each)}`);
    },
  );
  const others = all.filter((row) => row.device && !isMarked(row)).sort((one, other) => other.used_bytes - one.used_bytes);
  const texts = others.slice(0, OFFERED).map((row) => [addressOf(row, all), `${clean(programOf(row), 80)} on ${label(row.device)}`]);
  showChoices(offer, [["", "Add a program…"], ...texts], "");
  offer.hidden = markedRows().length >= MOST || !others.length;
}

function show() {
  const to = Math.ceil(state.frame.snapshot.taken_at);
  const points = histories.flatMap((each) => each.points);
  const from = Math.ceil(Math.max(Math.min(to - SECONDS, linked), points.reduce((first, { at }) => Math.min(first, at), to - 1)));
  const within = (time) => Math.min(Math.max(time, from), to);
  const held = Number(address.read("at"));
  const first = within(moments.moment || held || Math.min(from + SETTLED, (from + to) / 2));
  const last = moments.until ? within(moments.until) : to;
  const [at, end] = [Math.min(first, last), Math.max(first, last)];
  const top = 1.05 * points.reduce((most, { used }) => Math.max(most, used), 1); // the highest is below the edge
  shown = [from, to];
  [first, last].forEach((each, place) => showMoment(controls.children[place + 1], each));
  empty.hidden = histories.length > 0;
  controls.hidden = !histories.length;
  sync(
    charts,
    histories,
    ({ row }) => row.key,
    ({ row }) => {
      const plot = createPlot(`Memory of ${clean(programOf(row), 80)}`);
      choosesMoment(plot);
      return make("div", make("h3", named(programOf(row), 80)), make("p.quiet"), plot);
    },
    ({ children: [, note, plot] }, { row: { started_at: started, ended }, lives, points: own, seconds }) => {
      put(note, capital([...lives.map((life) => `pid ${life.pid} until ${clock(life.at)}`), ...(ended ? [`ended ${clock(ended)}`] : [])].join(", ")));
      const columns = intervals(own, seconds, from, to).map((column) => ({ ...column, layers: layersOf(column) }));
      const view = { ...PLAIN, from, to, started, starter: "process", columns, blocks: seconds !== null, top };
      drawPlot(plot, { ...view, summary: plot.ariaLabel });
      drawMoments(plot, view, at, end);
    },
  );
  showTogether(from, to, top, at, end);
  readTables({ at, end, to });
}

/** The used memory of all programs in one chart. */
function showTogether(from, to, top, at, end) {
  together.hidden = histories.length < 2;
  if (together.hidden) return;
  const x = (time) => ((1000 * (time - from)) / (to - from)).toFixed(2);
  const step = ({ at: begin, end, used }) => `L${x(begin)} ${(100 - (100 * used) / top).toFixed(2)}H${x(end)}`;
  const texts = histories.map(({ row }) => `${clean(programOf(row), 60)} ${sizeText(row.used_bytes)}`);
  const axes = { ...PLAIN, from, to, top, columns: [], blocks: false, summary: `Used memory now: ${texts.join(", ")}` };
  drawPlot(overlay, axes);
  overlay.querySelector(".unknown").remove();
  const lines = histories.map(({ place, points, seconds }) => ({ place, d: runs(intervals(points, seconds, from, to)).map((run) => `M${run.map(step).join("").slice(1)}`).join("") }));
  overlay.querySelector("svg").append(...lines.map(({ place, d }) => svg("path", { class: `series series-${place}`, d })));
  drawMoments(overlay, axes, at, end);
}

function drawMoments(plot, view, at, end) {
  drawCursor(plot, view, at);
  drawSelection(plot, view, end < view.to ? [at, end] : null);
}

/** Shows the tables when what was held at the moments is known: the charts have blocks, which change later. */
async function readTables(times) {
  wanted = times;
  if (reading) return;
  reading = true;
  for (let own = null; own !== wanted; showTables(own)) {
    own = wanted;
    const past = [own.at, own.end].filter((time) => time < own.to);
    holdings = new Map(await Promise.all(past.map(async (at) => [at, holdings.get(at) ?? (await holdingsAt(at))])));
  }
  reading = false;
}

function showTables({ at, end, to }) {
  const moment = end === to ? "now" : clock(end);
  put(of, `Between programs, ${end === to ? "" : "at "}${moment}`);
  put(since, `Between ${clock(at)} and ${moment}`);
  const rows = histories.map((history) => ({ program: history.row.program, ...pointAt(history, end) }));
  const columns = columnsOf(rows);
  const key = columns.map(({ title }) => title).join();
  if (programs.key !== key) {
    const table = Object.assign(createTable("Differences between programs", columns), { key });
    programs.replaceWith(table);
    programs = table;
  }
  programs.parentNode.hidden = rows.length < 2;
  for (const table of [programs, changed]) table.parentNode.classList.toggle("whole", rows.length > 2);
  const compared = NAMES.map((share) => ({ share, values: rows.map((row) => row[share]) }));
  showTable(programs, compared.filter(({ values }) => values.some(Boolean)), ({ share }) => share);
  const entries = histories.flatMap((history) => changes(history, at, end));
  changed.parentNode.hidden = !entries.length;
  showTable(changed, entries, (each) => `${each.key} ${each.share}`);
}

/** What a program held at a time. If it used nothing, it has nothing of any share; beside known live memory, what isn't
opaque is known. */
function pointAt({ row, lives, points }, time) {
  const keys = [row, ...lives].map(processKey);
  const held = holdings.get(time)?.find((each) => each.device_uuid === row.device_uuid && keys.includes(processKey(each)));
  const found = held ? addShares({ pid: held.pid, used: held.used_bytes }, held) : points.findLast(({ at }) => at <= time);
  if (found?.used === 0) return { ...NOTHING, ...found };
  return found?.live === undefined ? found : { opaque: 0, ...found };
}

/** Bytes of each share of a process at two times. */
function changes(history, at, end) {
  const { row } = history;
  const [before, after] = [pointAt(history, at), pointAt(history, end)];
  const names = NAMES.filter((share) => before?.[share] || after?.[share]);
  const pids = new Set([before, after].flatMap((point) => point?.pid ?? []));
  const program = programOf({ ...row, pid: [...pids].join(", then ") });
  return names.map((share) => ({ key: row.key, share, program, before: before?.[share], after: after?.[share] }));
}

addView("compare", create, load);
