// History charts of the machine, devices and processes. All of them show the same range of time and the same crosshair,
// and continue with each frame.

import * as address from "./address.js";
import { chartTable, csvOf, fileName } from "./downloads.js";
import { button, make, put, saveBlob } from "./elements.js";
import { age, clock, sizeText, sum, words } from "./format.js";
import { marksAt, marksOf } from "./chartmarks.js";
import { readPast } from "./history.js";
import { createPlot, drawCursor, drawPlot, drawSelection } from "./plot.js";
import { CHART_RANGES, between, limits, moved, newest, rangeOf, rangeText, zoomed } from "./range.js";
import { intervals } from "./intervals.js";
import { addShares } from "./shares.js";
import { columnAt, layersOf } from "./sharelayers.js";
import { changed, drawing, eventsSince, label, processOf, roots, sharesOfAll, state } from "./state.js";
import { OF_PROCESSES, SHARES } from "./words.js";

const PAUSE = 10_000; // between requests for the newest values
const YOUNG = 900; // seconds of the longest range that begins with the daemon, if it is younger
const SHORTEST = 20; // seconds of such a range
const FOLLOWED = 3600; // seconds of the longest range that each frame continues
const LONGEST_PAUSE = 60_000;
const MINUTE = 60;
const AFTER = 3; // seconds after an event that are shown with the minute before it
const DRAGGED = 5; // pixels below which a drag is a click, and a click one on the held moment
const WRITTEN = 200; // milliseconds after which what is shown is in the address: browsers limit how often it may change
const STEP = 0.02; // of the range, by which a key moves the crosshair

const middle = ({ seconds, to }, end) => (to === null ? end : to - seconds / 2);
const CONTROLS = [
  ["◀", "Earlier", (shown, end) => moved(shown, -0.5, end)],
  ["▶", "Later", (shown, end) => moved(shown, 0.5, end)],
  ["−", "Zoom out", (shown, end) => zoomed(shown, middle(shown, end), 2, end)],
  ["+", "Zoom in", (shown, end) => zoomed(shown, middle(shown, end), 0.5, end)],
];

const charts = new Set(); // elements
let range = rangeOf(address.read("range")) ?? newest();
let writing = 0; // timer
let cursor = Number(address.read("at")) || null; // unix time of the crosshair, in all charts
let held = cursor !== null; // the crosshair stays, until a click on it or Escape

/** An element with the history of the machine (`uuid` is empty), a device (`pid` is null) or a process, and its `spans`,
if it has any: intervals that are marked, and `bound`: a level in bytes. It is drawn until it leaves the page.

`drawn(view)` is called after each drawing, `pointed(at, interval, held)` with the time of the crosshair, or without one.
`hidden`: shares that are not drawn; call `redraw` after a change. */
export function createChart(target, { drawn = () => {}, pointed = () => {}, hidden = new Set() } = {}) {
  const plot = createPlot("Chart. For its keys, press the question mark.");
  const node = make("div.history", make("div.head", legend(target), controls()), plot, make("p.summary"), make("p.readout"));
  node.lastChild.setAttribute("role", "status");
  Object.assign(node, { target, plot, drawn, pointed, left: hidden, redraw: () => show(node), view: null, due: 0, range: null, past: null, fresh: [] });
  node.querySelector(".save").addEventListener("click", () => save(node));
  listen(node);
  charts.add(node);
  queueMicrotask(() => draw(node)); // when it is in the page
  return node;
}

function legend({ pid }) {
  const keys = (pid === null ? SHARES : OF_PROCESSES).map((share) => make("span", make(`i.${share}`), share));
  return make("div.keys", make("span", make("i.used"), "used (driver)"), ...keys);
}

/** Shows the history of another target in a chart. */
export function setTarget(node, target) {
  if (node.target.uuid === target.uuid && node.target.pid === target.pid) return;
  Object.assign(node, { target, range: null });
  draw(node);
}

function controls() {
  const group = make("div.ranges");
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "Range");
  for (const [text, seconds] of CHART_RANGES) group.append(button(text, () => setRange(newest(seconds)), "button.plain"));
  for (const [sign, text, change] of CONTROLS) {
    const act = button(sign, () => setRange(change(range, now())), "button.plain");
    act.ariaLabel = act.title = text;
    group.append(act);
  }
  const save = button("CSV", () => {}, "button.plain.save");
  save.title = save.ariaLabel = "CSV of the chart";
  group.append(save);
  return group;
}

function setRange(changed) {
  range = changed;
  writeSoon();
  for (const node of charts) {
    press(node);
    draw(node);
  }
}

export const showRange = (seconds) => setRange(newest(seconds));
/** Shows the time from `at` until now in all charts. */
export const showSince = (at) => setRange(between(Math.min(at, now() - 60), now(), now()));

/** Shows the minute before `at` in all charts, with the crosshair at its end. */
export function showMinuteBefore(at) {
  setRange({ seconds: MINUTE + AFTER, to: at + AFTER });
  setCursor(at, true);
}

function writeSoon() {
  clearTimeout(writing);
  writing = setTimeout(write, WRITTEN);
}

/** Writes the range and the held moment, with which the range is closed: later, a link shows the same. */
function write() {
  const { from, to } = shownLimits(range);
  const shown = held ? { seconds: to - from, to } : range;
  address.write("at", held ? cursor.toFixed(3) : "");
  address.write("range", shown.to === null && shown.seconds === newest().seconds ? "" : rangeText(shown));
}

/** Marks the chosen range. Its button says what the chart shows of it while the daemon is younger. */
function press(node) {
  const acts = node.querySelectorAll(".ranges button");
  const { from, to } = shownLimits(range);
  CHART_RANGES.forEach(([text, seconds], place) => {
    const pressed = range.to === null && range.seconds === seconds;
    acts[place].setAttribute("aria-pressed", pressed);
    put(acts[place], pressed && to - from < seconds ? age(to - from) : text);
  });
}

const now = () => state.frame.snapshot.taken_at;
/** True while newer frames belong to the range, or values of it may not have been read yet. */
const continues = () => range.to === null || range.to > now() - PAUSE / 1000;

async function draw(node) {
  if (!state.frame || !node.isConnected) return;
  const own = range;
  const { target } = node;
  const fresh = node.range !== own;
  if (fresh) Object.assign(node, { range: own, past: null, fresh: [] });
  node.due = performance.now() + Math.min(Math.max(PAUSE, 5 * own.seconds), LONGEST_PAUSE);
  try {
    const past = await readPast(target, { from: limits(own, now()).from, to: own.to }, node.past);
    if (range !== own || node.target !== target || !node.isConnected) return; // the user chose something else
    node.past = past;
  } catch {
    return; // a notice says that the daemon does not answer
  }
  if (fresh && document.documentElement.dataset.seq !== String(state.frame.snapshot.seq)) changed(); // so that all figures are of one frame
  if (fresh || own.to !== null || own.seconds > FOLLOWED) show(node);
}

/** Draws what is known: the history, and the frames that came after it. */
function show(node) {
  const { target, past, range: own } = node;
  if (!past || !state.frame) return;
  const { from, to } = shownLimits(own);
  press(node);
  const about = { from, to, ...beginning(target) };
  const last = (past.points.at(-1)?.at ?? -Infinity) + (past.seconds ?? 0);
  node.fresh = node.fresh.filter(({ at }) => at > last);
  const points = [...past.points, ...node.fresh];
  const newest = own.to === null ? newestPoint(target, to) : null;
  const within = [...points.filter(({ at }) => at < to), ...(newest ? [newest] : [])];
  const columns = intervals(within, past.seconds, from, to, about.started);
  for (const column of columns) column.layers = layersOf(column, node.left);
  const size = sizeOf(target);
  const marks = marksOf([...state.events.values()], target);
  const view = { ...about, columns, blocks: past.seconds !== null, size, marks, whole: target.pid === null };
  node.view = { ...view, spans: target.spans ?? [], bound: target.bound ?? null, summary: columns.length ? summary(columns, about, own, columns.at(-1)) : "No data for this range." };
  node.view.top = drawPlot(node.plot, node.view);
  node.plot.dataset.range = rangeText(own);
  const unmarked = eventsSince() > from && `Events before ${clock(eventsSince(), to)} aren’t marked.`;
  put(node.querySelector(".summary"), [node.view.summary, unmarked].filter(Boolean).join(" "));
  showCursor(node);
  node.drawn(node.view);
}

const startedAt = () => now() - state.frame.snapshot.elapsed_seconds;

/** Start and end of what charts show of a range, as unix times. */
function shownLimits(own) {
  const { from, to } = limits(own, now());
  const young = own.to === null && own.seconds <= YOUNG;
  return { from: young ? Math.max(from, Math.min(startedAt(), to - SHORTEST)) : from, to };
}

/** Since when there can be values, and what has started then. */
function beginning({ uuid, ...target }) {
  const started = startedAt();
  const own = target.pid === null ? null : processOf(uuid, target)?.started_at;
  return own > started ? { started: own, starter: "process" } : { started, starter: "daemon" };
}

function sizeOf({ uuid }) {
  const sizes = (uuid ? [state.devices.get(uuid)] : roots()).map((device) => device?.size_bytes ?? null);
  return sizes.some((size) => size === null) ? null : sum(sizes);
}

/** Continues a chart with the newest frame. */
function follow(node) {
  const at = now();
  if (node.fresh.at(-1)?.at === at || !node.past) return;
  const point = newestPoint(node.target, at);
  if (point) node.fresh.push(point);
}

function newestPoint({ uuid, pid, start_ticks }, at) {
  const devices = uuid ? [state.devices.get(uuid)] : roots();
  if (devices.some((device) => !device || device.used_bytes === null || device.missed_readings)) return null;
  if (pid === null) {
    const used = sum(devices.map((device) => device.used_bytes));
    return { at, low: used, high: used, used, ...sharesOfAll(devices) };
  }
  const own = processOf(uuid, { pid, start_ticks });
  const used = own?.used_bytes ?? null;
  return used === null ? null : addShares({ at, low: used, high: used, used }, own);
}

function summary(used, { from, to }, { to: end }, last) {
  const lowest = sizeText(Math.min(...used.map((each) => each.low)));
  const highest = sizeText(Math.max(...used.map((each) => each.high)));
  const when = end === null ? `since ${clock(used[0].at, to)}` : `from ${clock(from, to)} to ${clock(to)}`;
  return `Used: ${lowest} to ${highest} ${when}, most recently ${sizeText(last.used)}.`;
}

/** The values at the crosshair, as a sentence. */
function readout({ size, marks, from, to }, column) {
  const values = column ? SHARES.filter((share) => column[share]).map((share) => `${share} ${sizeText(column[share])}`) : [];
  if (column) values.unshift(`used (driver) ${sizeText(column.used)}${size === null ? "" : ` of ${sizeText(size)}`}`);
  const near = new Set(marksAt(marks, cursor, from, to).map((mark) => words(mark.kind)));
  return [`${clock(cursor, to)}: ${values.join(", ") || "no data"}`, ...near].join("; ");
}

const isIn = ({ from, to }) => cursor !== null && cursor >= from && cursor <= to;

/** What the target of a chart held at the held moment, as the table has it: the chart may leave out its reading. */
function heldAt({ uuid, pid, start_ticks: start }) {
  if (state.past?.snapshot.taken_at !== cursor) return null;
  const uuids = uuid ? [uuid] : roots().map((device) => device.uuid);
  const own = state.past.holdings.filter((each) => each.pid === pid && uuids.includes(each.device_uuid) && (pid === null || each.start_ticks === start));
  return own.length ? own.reduce(addShares, { at: cursor, used: sum(own.map((each) => each.used_bytes)) }) : null;
}

export const showCursors = () => charts.forEach(showCursor);

function showCursor(node) {
  if (!node.view) return;
  drawCursor(node.plot, node.view, cursor);
  const shown = isIn(node.view);
  const column = heldAt(node.target) ?? columnAt(node.view.columns, cursor);
  put(node.querySelector(".readout"), shown ? readout(node.view, column) : "", 600);
  node.pointed(...(shown ? [cursor, column ?? {}, held] : []));
}

/** `hold`: whether the crosshair stays when the pointer or the focus leaves. */
function setCursor(at, hold = false) {
  if (held || hold) writeSoon();
  [cursor, held] = [at, hold];
  showCursors();
}

function listen(node) {
  const { plot } = node;
  let dragged = null; // unix time at which a drag began
  const timeOf = (event) => {
    const { left, width } = plot.getBoundingClientRect();
    const { from, to } = node.view;
    return from + (to - from) * Math.min(Math.max((event.clientX - left) / width, 0), 1);
  };
  const onView = (act) => (event) => node.view && act(event);
  plot.addEventListener("pointermove", onView((event) => {
    if (!held || !isIn(node.view)) setCursor(timeOf(event));
    if (dragged !== null) drawSelection(plot, node.view, [dragged, timeOf(event)]);
  }));
  plot.addEventListener("pointerleave", () => held || dragged !== null || setCursor(null));
  plot.addEventListener("pointerdown", onView((event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    plot.setPointerCapture(event.pointerId);
    dragged = timeOf(event);
  }));
  const end = onView((event) => {
    if (dragged === null) return;
    const [from, to] = [dragged, timeOf(event)];
    const differs = (one, other) => (Math.abs(one - other) * plot.clientWidth) / (node.view.to - node.view.from) >= DRAGGED;
    dragged = null;
    drawSelection(plot, node.view, null);
    if (event.type !== "pointerup") return;
    if (differs(from, to)) setRange(between(Math.min(from, to), Math.max(from, to), now()));
    else setCursor(to, !held || differs(cursor, to));
  });
  plot.addEventListener("pointerup", end);
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("dblclick", () => {
    release();
    setRange(newest());
  });
  plot.addEventListener("wheel", onView((event) => {
    if (document.activeElement !== plot && !event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    setRange(zoomed(range, timeOf(event), (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, now()));
  }), { passive: false });
  plot.addEventListener("keydown", onView((event) => {
    const act = keys(node.view)[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }));
  plot.addEventListener("blur", () => held || setCursor(null));
}

/** Ends what is held. */
export const release = () => setCursor(null);

/** Ends what is held, or shows the newest range. */
function latest() {
  if (!held || range.to !== null) setRange(newest());
  setCursor(null);
}

function keys({ from, to }) {
  const at = cursor ?? (from + to) / 2;
  const move = (share) => () => setCursor(Math.min(Math.max(at + share * (to - from), from), to), held);
  const zoom = (factor) => () => setRange(zoomed(range, at, factor, now()));
  const pan = (share) => () => setRange(moved(range, share, now()));
  const found = { ArrowLeft: move(-STEP), ArrowRight: move(STEP), Home: move(-1), End: move(1), Escape: latest, Enter: () => setCursor(at, !held) };
  return { ...found, "+": zoom(0.5), "=": zoom(0.5), w: zoom(0.5), "-": zoom(2), s: zoom(2), a: pan(-0.25), d: pan(0.25) };
}

function save({ view, target: { uuid, pid } }) {
  if (!view) return;
  const device = state.devices.get(uuid);
  const subject = pid === null ? (device ? `gpu-${device.index}` : "machine") : `pid-${pid}`;
  const reserved = sum((device ? [device] : roots()).map((each) => each.reserved_bytes ?? 0));
  const table = chartTable(view.columns, { ...device, size: pid === null ? view.size : null, reserved });
  saveBlob(fileName(subject, view.to), new Blob([csvOf(table)], { type: "text/csv" }));
}

setInterval(() => {
  if (document.hidden || state.paused || !state.frame) return;
  for (const node of charts) {
    if (!node.isConnected) charts.delete(node);
    else if (continues() && performance.now() >= node.due && node.offsetParent) draw(node);
  }
}, 1000);
drawing.addEventListener("change", () => {
  if (!state.frame || !continues()) return;
  for (const node of charts) {
    follow(node);
    if (range.seconds <= FOLLOWED && node.offsetParent) show(node);
  }
});
