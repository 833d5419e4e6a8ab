// Evidence of a leak: the points of its curve, the line through them, and the time at which the device is full.

import { make, put, svg } from "./elements.js";
import { clock, human } from "./format.js";

const SPANS = 6; // the time of the crossing is drawn if it is within this multiple of the time of the points

export function createFit() {
  const plot = make("div.plot", make("span.top"), make("span.from"), make("span.to"));
  const node = make("details.fit", make("summary", "Evidence"), plot, make("p"), make("ul.refused"));
  node.addEventListener("toggle", () => draw(node));
  return node;
}

export function showFit(node, fit) {
  node.hidden = !fit;
  const text = JSON.stringify(fit);
  if (!fit || node.drawn === text) return;
  Object.assign(node, { drawn: text, fit });
  draw(node);
}

/** Limits of the drawing: unix times and bytes. `full`: the bytes of this curve at which the device is full. */
export function limits(fit) {
  const { points, at, full_at: full, full_at_latest: latest, band_bytes: band } = fit;
  const from = points[0][0];
  const span = Math.max(1, at - from);
  const crossing = full !== null && full - from <= SPANS * span;
  const last = crossing ? Math.max(at, Math.min(latest ?? full, from + (SPANS + 1) * span)) : at + span;
  const bytes = points.map(([, value]) => value);
  const low = Math.max(0, Math.min(...bytes, line(fit, from)) - band);
  const high = Math.max(...bytes, line(fit, last)) + band;
  return { from, to: last, low, high, full: crossing ? line(fit, full) : null };
}

/** Bytes of the line at a unix time. */
export const line = (fit, at) => fit.level_bytes + fit.slope_bytes_per_second * (at - fit.at);

function draw(node) {
  const { fit } = node;
  if (!fit || !node.open) return;
  const { from, to, low, high, full } = limits(fit);
  const x = (at) => ((1000 * (Math.min(Math.max(at, from), to) - from)) / (to - from)).toFixed(2);
  const y = (bytes) => (100 - (100 * (bytes - low)) / Math.max(1, high - low)).toFixed(2);
  const along = (times, more) => times.map((at) => `${x(at)} ${y(line(fit, at) + more)}`);
  const path = (kind, d) => svg("path", { class: kind, d });
  const ends = [from, to];
  const shapes = [
    path("band", `M${[...along(ends, fit.band_bytes), ...along([to, from], -fit.band_bytes)].join("L")}Z`),
    path("line", `M${along(ends, 0).join("L")}`),
    path("points", fit.points.map(([at, bytes]) => `M${x(at)} ${y(bytes)}h0`).join("")),
  ];
  if (full !== null) {
    const [earliest, latest] = [fit.full_at_earliest ?? fit.full_at, fit.full_at_latest ?? to];
    shapes.unshift(path("crossing", `M${x(earliest)} 0H${x(latest)}V100H${x(earliest)}Z`));
    shapes.push(path("full", `M0 ${y(full)}H1000`), path("crossed", `M${x(fit.full_at)} 0V100`));
  }
  const text = summary(fit);
  const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": text });
  drawing.append(...shapes);
  const plot = node.querySelector(".plot");
  plot.querySelector("svg")?.remove();
  plot.prepend(drawing);
  put(plot.querySelector(".top"), full === null ? human(high) : `${human(full)}: the device is full`);
  put(plot.querySelector(".from"), clock(from, to));
  put(plot.querySelector(".to"), clock(to));
  put(node.querySelector("p"), text);
  node.querySelector(".refused").replaceChildren(
    ...fit.refused.map(({ kind, reason, value }) => make("li", `Other explanation, ${kind}: the ${reason} is ${value.toFixed(2)}.`)),
  );
}

function summary(fit) {
  const minute = (slope) => human(60 * slope);
  const { slope_bytes_per_second: slope, slope_low_bytes_per_second: slow, slope_high_bytes_per_second: fast } = fit;
  const rate = `${minute(slope)} each minute (${minute(slow)} to ${minute(fast)})`;
  if (fit.full_at === null) return `${rate}.`;
  const moment = (at) => clock(at, fit.at);
  const earliest = fit.full_at_earliest === null ? "" : `earliest ${moment(fit.full_at_earliest)}`;
  const latest = fit.full_at_latest === null ? "" : `latest ${moment(fit.full_at_latest)}`;
  const interval = [earliest, latest].filter(Boolean).join(", ");
  return `${rate}; the device is full at ${moment(fit.full_at)}${interval && ` (${interval})`}.`;
}
