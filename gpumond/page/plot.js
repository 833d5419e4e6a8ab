// Draws a chart: layers, the driver's count, the size, lines of the axes, marks and what is unknown.

import { make, put, svg, sync } from "./elements.js";
import { clean, clock, sizeText, words } from "./format.js";
import { NARROW, runs, unknown } from "./intervals.js";
import { spaceOf, together } from "./chartmarks.js";
import { causesOf, timesOf } from "./eventgroups.js";
import { byteLines, timeLines } from "./range.js";
import { runsOf, topOf } from "./sharelayers.js";
import { SHARES } from "./words.js";

const TIMES = 8; // lines of the axis of time, at most
const SPACE = 64; // pixels for the text of one
const CLOSE = 24; // pixels between two signs with their numbers, at least
let hatches = 0; // number of patterns
const NEAR_SIZE = 0.06; // of the height: a line this close to the size has no text
const EDGE = 28; // pixels: lines closer to the ends have no text, which would not fit

/** Draws `view` into the plot: its range, columns, used memory with its limits, size, marks and summary. Returns the bytes
at the upper edge, which `view.top` may state. */
export function drawPlot(plot, view) {
  const { from, to, columns, blocks, size } = view;
  const data = topOf(columns);
  const wide = plot.wide || plot.clientWidth; // to ask for the width again would compute the layout
  const sized = size !== null && (view.whole || size <= 1.5 * data);
  const top = view.top ?? (sized ? Math.max(size, data) : 1.05 * data);
  const x = (at) => ((1000 * (at - from)) / (to - from)).toFixed(2);
  const y = (bytes) => (100 - (100 * bytes) / top).toFixed(2);
  const along = (run, key) => run.map((range) => `L${x(range.at)} ${y(range[key])}L${x(range.end)} ${y(range[key])}`).join("");
  const back = (run) => [...run].reverse().map((range) => ({ ...range, at: range.end, end: range.at }));
  const area = (run) => `M${along(run, "high").slice(1)}${along(back(run), "low")}Z`;
  const line = (run) => `M${along(run, "used").slice(1)}`;
  const path = (kind, d) => svg("path", { class: kind, d });
  const times = timeLines(from, to, Math.min(TIMES, Math.max(2, Math.floor(wide / SPACE))));
  const inner = times.filter((at) => wide * Math.min(at - from, to - at) >= EDGE * (to - from));
  const levels = byteLines(top);
  const grid = [...times.map((at) => `M${x(at)} 0V100`), ...levels.map((bytes) => `M0 ${y(bytes)}H1000`)];
  const known = runs(columns);
  const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": view.summary });
  drawing.append(
    path("grid", grid.join("")),
    ...SHARES.map((share) => path(`layer ${share}`, runsOf(columns, share).map(area).join(""))),
  );
  if (columns.some((column) => column.stranded)) drawing.append(...hatched(plot, runsOf(columns, "stranded").map(area).join("")));
  if (blocks) drawing.append(path("band", known.map(area).join("")));
  drawing.append(path("used", known.map(line).join("")));
  if (sized) drawing.append(path("size", `M0 ${y(size)}H1000`));
  if (view.bound !== null && view.bound <= top) drawing.append(path("bound", `M0 ${y(view.bound)}H1000`));
  plot.querySelectorAll("svg, .unknown, .axis, .span").forEach((old) => old.remove());
  plot.prepend(
    drawing,
    ...unknown(columns, from, to).map((part) => hatching(part, view, wide)),
    ...view.spans.filter((span) => span.to >= from && span.from <= to).map((span) => marking(span, view)),
    ...levels.filter((bytes) => !sized || Math.abs(bytes - size) > NEAR_SIZE * top).map((bytes) => tick("axis.level", sizeText(bytes).replace(".0", ""), { top: `${y(bytes)}%` })),
    ...inner.map((at) => tick("axis.time", clock(at, to), { left: `${x(at) / 10}%` })),
    ...(sized ? [tick("axis.level.sized", sizeText(size).replace(".0", ""), { top: `${y(size)}%` })] : []),
  );
  drawMarks(plot.querySelector(".marks"), view, wide);
  return top;
}

function tick(kind, text, place) {
  const node = make(`span.${kind}`, text);
  Object.assign(node.style, place);
  return node;
}

/** The area of stranded memory, hatched as in bars. The pattern is scaled back, because the drawing is stretched. */
function hatched(plot, d) {
  plot.hatch ??= `hatch-${(hatches += 1)}`;
  const scale = `scale(${1000 / Math.max(1, plot.wide ?? plot.clientWidth)} ${100 / Math.max(1, plot.high ?? plot.clientHeight)}) rotate(45)`;
  const pattern = svg("pattern", { id: plot.hatch, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: scale });
  pattern.append(svg("path", { class: "stripe", d: "M0 0V4" }));
  return [pattern, svg("path", { class: "hatch", d, fill: `url(#${plot.hatch})` })];
}

/** Marks that are close to one another are one sign, that of the most urgent one at its time, with the number of their
causes. */
function drawMarks(list, { marks, from, to }, width) {
  const within = (mark) => mark.at >= from && mark.at <= to;
  const groups = together(marks, spaceOf((CLOSE * (to - from)) / Math.max(1, width)));
  sync(
    list,
    groups.map((group) => group.filter(within)).filter((group) => group.length),
    ([first]) => first.id,
    () => make("li", make("span"), make("small")),
    (node, group) => {
      const [{ at, kind, sign }] = group;
      const causes = causesOf(group).length;
      node.className = clean(kind);
      node.title = group.map((mark) => clean(`${clock(mark.at, to)}: ${words(mark.kind)}: ${mark.summary}${timesOf(mark, to)}`)).join("\n");
      put(node.firstChild, sign);
      put(node.lastChild, causes > 1 ? String(causes) : "");
      node.style.left = `${((100 * (at - from)) / (to - from)).toFixed(2)}%`;
    },
  );
}

/** Marks an unknown part. It ends with a start if the process, not an earlier one, started later, or the daemon a moment before the
first value. */
function hatching(part, { from, to, started, starter }, wide) {
  const near = Math.abs(part.to - started) < Math.max(10, NARROW * (to - from)) || (starter === "process" && started > part.from && part.to >= Math.min(started, to));
  const label = near ? `${starter} started ${clock(started)}` : "no data";
  const fits = (wide * (part.to - part.from)) / (to - from) > (near ? 2.8 : 1.4) * SPACE;
  const node = make(near ? "div.unknown.unstarted" : "div.unknown", make("span", fits ? label : ""));
  node.style.left = `${(100 * (part.from - from)) / (to - from)}%`;
  node.style.width = `${(100 * (part.to - part.from)) / (to - from)}%`;
  node.title = label;
  return node;
}

/** Marks an interval, at least so that it can be seen. */
function marking({ from: begin, to: end, summary }, { from, to }) {
  const node = make("div.span");
  const x = (at) => (100 * (Math.min(Math.max(at, from), to) - from)) / (to - from);
  node.style.left = `${x(begin)}%`;
  node.style.width = `max(2px, ${x(end) - x(begin)}%)`;
  node.title = clean(`${clock(begin, to)} to ${clock(end, to)}: ${summary}`, 600);
  return node;
}

/** Shows the crosshair at a time, or hides it. */
export function drawCursor(plot, view, at) {
  const node = plot.querySelector(".cursor");
  node.hidden = at === null || at < view.from || at > view.to;
  if (!node.hidden) node.style.left = `${(100 * (at - view.from)) / (view.to - view.from)}%`;
}

/** Shows the part of the range that the user drags over, or hides it. */
export function drawSelection(plot, view, ends) {
  const node = plot.querySelector(".selection");
  node.hidden = ends === null;
  if (!ends) return;
  const [first, last] = [...ends].sort((one, other) => one - other);
  node.style.left = `${(100 * (first - view.from)) / (view.to - view.from)}%`;
  node.style.width = `${(100 * (last - first)) / (view.to - view.from)}%`;
}

/** The element that a chart is drawn into. */
export function createPlot(label) {
  const hidden = (kind) => Object.assign(make(kind), { hidden: true });
  const plot = make("div.plot", hidden("div.selection"), hidden("div.cursor"), make("ul.marks"));
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", label);
  new ResizeObserver(([{ contentRect }]) => Object.assign(plot, { wide: contentRect.width, high: contentRect.height })).observe(plot);
  return plot;
}
