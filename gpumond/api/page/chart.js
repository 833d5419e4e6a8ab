// History charts of devices and processes.

import { button, make, put, svg } from "./elements.js";
import { clock, duration, human } from "./format.js";
import { NARROW, intervals, runs, unknown } from "./intervals.js";
import { changed, state } from "./store.js";
import { read } from "./stream.js";

const PAUSE = 5000;
const RANGES = [
  ["15 min", 900],
  ["1 h", 3600],
  ["24 h", 86400],
];
const SIGNALS = ["used", "held", "live"];

const charts = new Map(); // element → what it shows

/** Shows or hides the history in `node`. */
export function toggle(node, target) {
  const place = node.querySelector(".history");
  const hidden = node.querySelector(".more") ?? place;
  hidden.hidden = !hidden.hidden;
  node.querySelector("[aria-expanded]").setAttribute("aria-expanded", String(!hidden.hidden));
  if (hidden.hidden) {
    charts.delete(place);
  } else {
    if (!place.firstChild) place.append(...createControls(place));
    charts.set(place, { ...target, seconds: RANGES[0][1] });
    press(place, RANGES[0][1]);
    draw(place);
  }
  if (state.frame) changed();
}

function createControls(place) {
  const ranges = make("div.ranges");
  ranges.setAttribute("role", "group");
  ranges.setAttribute("aria-label", "Range");
  for (const [text, seconds] of RANGES) {
    const choose = () => {
      charts.get(place).seconds = seconds;
      press(place, seconds);
      draw(place);
    };
    ranges.append(button(text, choose, "button.plain"));
  }
  const legend = make(
    "div.keys",
    make("span", make("i.used"), "used (driver)"),
    make("span", make("i.held"), "held by its pools"),
    make("span", make("i.live"), "live"),
  );
  const plot = make("div.plot", make("span.top"), make("span.from"), make("span.to"));
  return [make("div.head", legend, ranges), plot, make("p.summary")];
}

function press(place, seconds) {
  RANGES.forEach(([, each], at) =>
    place.querySelectorAll(".ranges button")[at].setAttribute("aria-pressed", String(each === seconds)),
  );
}

async function history(target, signal, from, to, started) {
  const query = new URLSearchParams({ uuid: target.uuid, signal, since: from });
  if (target.pid) query.set("pid", target.pid);
  if (target.start_ticks) query.set("start_ticks", target.start_ticks);
  const answer = await read(`api/v1/history?${query}`);
  const { points, block_seconds } = answer.ok ? await answer.json() : { points: [], block_seconds: null };
  return { blocks: block_seconds !== null, ranges: intervals(points, block_seconds, from, to, started) };
}

async function draw(place) {
  const target = charts.get(place);
  if (!target || !state.frame) return;
  const { seconds } = target;
  const { taken_at: to, elapsed_seconds } = state.frame.snapshot;
  const from = to - seconds;
  const started = to - elapsed_seconds;
  let series;
  try {
    series = await Promise.all(SIGNALS.map((signal) => history(target, signal, from, to, started)));
  } catch {
    return; // a notice says that the daemon does not answer
  }
  if (charts.get(place) !== target || target.seconds !== seconds) return; // the user chose something else
  const [used, held, live] = series.map((one) => one.ranges);
  const top = Math.max(1, ...series.flatMap((one) => one.ranges.map((range) => range.high)));
  const x = (at) => ((1000 * (at - from)) / seconds).toFixed(2);
  const y = (bytes) => (100 - (96 * bytes) / top).toFixed(2);
  const steps = (run, key) => run.map((range) => `L${x(range.at)} ${y(range[key])}L${x(range.end)} ${y(range[key])}`);
  const line = (run) => `M${steps(run, "median").join("").slice(1)}`;
  const area = (run) => `M${x(run[0].at)} 100${steps(run, "median").join("")}L${x(run.at(-1).end)} 100Z`;
  const band = (run) => {
    const back = [...run].reverse().map((range) => ({ at: range.end, end: range.at, low: range.low }));
    return `M${steps(run, "high").join("").slice(1)}${steps(back, "low").join("")}Z`;
  };
  const path = (kind, ranges, shape) => svg("path", { class: kind, d: runs(ranges).map(shape).join("") });
  const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" });
  drawing.append(path("live", live, area), path("held", held, line));
  if (series[0].blocks) drawing.append(path("band", used, band));
  drawing.append(path("used", used, line));
  const plot = place.querySelector(".plot");
  plot.querySelectorAll("svg, .unknown").forEach((old) => old.remove());
  plot.prepend(drawing, ...unknown(used, from, to).map((part) => hatching(part, from, seconds, started)));
  put(plot.querySelector(".top"), human(top));
  put(plot.querySelector(".from"), clock(from, to));
  put(plot.querySelector(".to"), clock(to));
  const text = summary(used, to);
  drawing.setAttribute("aria-label", text);
  put(place.querySelector(".summary"), text);
}

/** Marks an unknown part. It ends with the daemon's start if the daemon started a moment before the first value. */
function hatching(part, from, seconds, started) {
  const label = Math.abs(part.to - started) < Math.max(5, NARROW * seconds) ? `daemon started ${clock(started)}` : "no data";
  const node = make("div.unknown", make("span", label));
  node.style.left = `${(100 * (part.from - from)) / seconds}%`;
  node.style.width = `${(100 * (part.to - part.from)) / seconds}%`;
  node.title = label;
  return node;
}

function summary(used, to) {
  if (!used.length) return "There is no data for this range.";
  const lowest = human(Math.min(...used.map((range) => range.low)));
  const highest = human(Math.max(...used.map((range) => range.high)));
  return `Used between ${lowest} and ${highest} in the last ${duration(to - used[0].at)}; ${human(used.at(-1).median)} last.`;
}

setInterval(() => {
  if (document.hidden) return;
  for (const place of charts.keys()) place.isConnected ? draw(place) : charts.delete(place);
}, PAUSE);
