// History charts of devices and processes. All of them show the same range of time and the same crosshair.

import * as address from "./address.js";
import { chartTable, csvOf } from "./downloads.js";
import { button, make, put, saveBlob } from "./elements.js";
import { clock, duration, human } from "./format.js";
import { marksAt, marksOf } from "./marks.js";
import { readPast } from "./past.js";
import { createPlot, drawCursor, drawPlot, drawSelection } from "./plot.js";
import { RANGES, between, limits, moved, newest, rangeOf, rangeText, zoomed } from "./range.js";
import { LAYERS, columnAt, columnsOf, layersOf, restOf } from "./stack.js";
import { state } from "./store.js";

const PAUSE = 5000; // between requests for the newest values
const LONGEST_PAUSE = 60_000;
const DRAGGED = 5; // pixels below which a drag is a click
const WRITTEN = 200; // milliseconds after which a range is in the address: browsers limit how often it may change
const STEP = 0.02; // of the range, by which a key moves the crosshair
const HELP = "Chart. Left and right: crosshair. Plus and minus: zoom. A and D: earlier and later. Escape: latest.";

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
let cursor = null; // unix time of the crosshair, in all charts

/** An element with the history of a device (`pid` is null) or of a process, and its `spans`, if it has any: intervals
that are marked, and `bound`: a level in bytes. It is drawn until it leaves the page. */
export function createChart(target) {
  const plot = createPlot(HELP);
  const node = make("div.history", make("div.head", legend(target), controls()), plot, make("p.summary"), make("p.readout"));
  node.lastChild.setAttribute("role", "status");
  Object.assign(node, { target, plot, view: null, due: 0, range: null });
  node.querySelector(".save").addEventListener("click", () => save(node));
  listen(node);
  charts.add(node);
  press();
  queueMicrotask(() => draw(node)); // when it is in the page
  return node;
}

function legend({ pid }) {
  const layers = Object.entries(LAYERS).filter(([layer]) => pid === null || layer !== "unattributed");
  const keys = layers.map(([layer, text]) => make("span", make(`i.layer.${layer}`), make("span", text)));
  return make("div.keys", make("span", make("i.used"), "used (driver)"), ...keys);
}

function showLegend(node, rest) {
  const sign = node.querySelector(".keys .rest");
  sign.className = `layer rest ${rest}`;
  put(sign.nextSibling, rest);
}

function controls() {
  const group = make("div.ranges");
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "Range");
  for (const [text, seconds] of RANGES) group.append(button(text, () => setRange(newest(seconds)), "button.plain"));
  for (const [sign, text, change] of CONTROLS) {
    const act = button(sign, () => setRange(change(range, now())), "button.plain");
    act.ariaLabel = act.title = text;
    group.append(act);
  }
  group.append(button("CSV", () => {}, "button.plain.save"));
  return group;
}

function setRange(changed) {
  range = changed;
  clearTimeout(writing);
  writing = setTimeout(writeRange, WRITTEN);
  press();
  for (const node of charts) draw(node);
}

export const showRange = (seconds) => setRange(newest(seconds));

function writeRange() {
  address.write("range", range.to === null && range.seconds === newest().seconds ? "" : rangeText(range));
}

function press() {
  for (const node of charts)
    RANGES.forEach(([, seconds], place) => {
      const pressed = range.to === null && range.seconds === seconds;
      node.querySelectorAll(".ranges button")[place].setAttribute("aria-pressed", String(pressed));
    });
}

const now = () => state.frame.snapshot.taken_at;

async function draw(node) {
  if (!state.frame || !node.isConnected) return;
  const own = range;
  const { target } = node;
  const { from, to } = limits(own, now());
  const started = now() - state.frame.snapshot.elapsed_seconds;
  const about = { from, to, started };
  node.due = performance.now() + Math.min(Math.max(PAUSE, 5 * own.seconds), LONGEST_PAUSE);
  const names = ["used", "held", "live", ...(target.pid === null ? ["unattributed"] : [])];
  if (node.range !== own) Object.assign(node, { range: own, known: new Map() });
  let past;
  try {
    past = await readPast(target, names, about, node.known);
  } catch {
    return; // a notice says that the daemon does not answer
  }
  if (range !== own || !node.isConnected) return; // the user chose something else
  const { signals, blocks } = past;
  const { used } = signals;
  const size = state.devices.get(target.uuid)?.size_bytes ?? null;
  const marks = marksOf([...state.events.values()], target, from, to);
  const columns = columnsOf(signals);
  const whole = target.pid === null;
  const rest = restOf(columns, whole);
  const view = { ...about, columns, used, blocks, size, marks, whole, rest, spans: target.spans ?? [], bound: target.bound ?? null };
  node.view = { ...view, summary: summary(used, about, own) };
  drawPlot(node.plot, node.view);
  node.plot.dataset.range = rangeText(own);
  showLegend(node, rest);
  put(node.querySelector(".summary"), node.view.summary);
  showCursor(node);
}

function summary(used, { from, to }, { to: end }) {
  if (!used.length) return "No data for this range.";
  const lowest = human(Math.min(...used.map((each) => each.low)));
  const highest = human(Math.max(...used.map((each) => each.high)));
  const when = end === null ? `in the last ${duration(to - used[0].at)}` : `from ${clock(from, to)} to ${clock(to)}`;
  return `Used between ${lowest} and ${highest} ${when}; ${human(used.at(-1).median)} last.`;
}

/** The values at the crosshair, as a sentence. */
function readout({ columns, size, marks, from, to, rest }) {
  const column = columnAt(columns, cursor);
  const layers = column ? layersOf(column) : {};
  const names = { ...LAYERS, rest };
  const values = Object.keys(layers).map((layer) => `${names[layer]} ${human(layers[layer][1] - layers[layer][0])}`);
  if (column?.used !== undefined) values.push(`used (driver) ${human(column.used)}${size === null ? "" : ` of ${human(size)}`}`);
  const near = marksAt(marks, cursor, from, to).map((mark) => mark.summary);
  return [`${clock(cursor, to)}: ${values.join(", ") || "no data"}`, ...near].join("; ");
}

function showCursor(node) {
  if (!node.view) return;
  drawCursor(node.plot, node.view, cursor);
  const shown = cursor !== null && cursor >= node.view.from && cursor <= node.view.to;
  put(node.querySelector(".readout"), shown ? readout(node.view) : "", 600);
}

function setCursor(at) {
  cursor = at;
  for (const node of charts) showCursor(node);
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
    setCursor(timeOf(event));
    if (dragged !== null) drawSelection(plot, node.view, [dragged, cursor]);
  }));
  plot.addEventListener("pointerleave", () => dragged === null && setCursor(null));
  plot.addEventListener("pointerdown", onView((event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    plot.setPointerCapture(event.pointerId);
    dragged = timeOf(event);
  }));
  const end = onView((event) => {
    if (dragged === null) return;
    const [first, last] = [dragged, timeOf(event)].sort((one, other) => one - other);
    dragged = null;
    drawSelection(plot, node.view, null);
    const pixels = ((last - first) * plot.clientWidth) / (node.view.to - node.view.from);
    if (pixels >= DRAGGED && event.type === "pointerup") setRange(between(first, last, now()));
  });
  plot.addEventListener("pointerup", end);
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("dblclick", () => setRange(newest()));
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
  plot.addEventListener("blur", () => setCursor(null));
}

function keys({ from, to }) {
  const at = cursor ?? (from + to) / 2;
  const move = (share) => () => setCursor(Math.min(Math.max(at + share * (to - from), from), to));
  const zoom = (factor) => () => setRange(zoomed(range, at, factor, now()));
  const pan = (share) => () => setRange(moved(range, share, now()));
  const found = { ArrowLeft: move(-STEP), ArrowRight: move(STEP), Home: move(-1), End: move(1), Escape: () => setRange(newest()) };
  return { ...found, "+": zoom(0.5), "=": zoom(0.5), w: zoom(0.5), "-": zoom(2), s: zoom(2), a: pan(-0.25), d: pan(0.25) };
}

function save({ view, target }) {
  if (!view) return;
  const name = target.pid === null ? `gpu-${state.devices.get(target.uuid)?.index ?? "x"}` : `pid-${target.pid}`;
  saveBlob(`gpumond-${name}.csv`, new Blob([csvOf(chartTable(view))], { type: "text/csv" }));
}

setInterval(() => {
  if (document.hidden || state.paused) return;
  for (const node of charts) {
    if (!node.isConnected) charts.delete(node);
    else if (range.to === null && performance.now() >= node.due && node.offsetParent) draw(node);
  }
}, 1000);
