// Draws the evidence of a verdict.

import { make, named, put, svg, sync } from "./elements.js";
import { limits, shapes } from "./evidenceshapes.js";
import { figures, summary } from "./evidencetexts.js";
import { capital, clean, clock, sizeText } from "./format.js";
import { label, state } from "./state.js";

const SAID = ["slope_bytes_per_second", "window_seconds"]; // what the sentence about the line contains

/** Draws the evidence of `node.verdict`, of a frame that was taken at `node.now`, and `node.remedy`. */
export function drawFit(node) {
  if (node.children.length === 1)
    node.append(make("div.plot", make("span.top"), make("span.from"), make("span.to")), make("p"), make("ul.ruled-out"), make("dl.facts"), make("p.next"));
  const { fit, evidence = [], retained_by: kept, pid } = node.verdict;
  node.querySelector(".plot").hidden = !fit;
  put(node.lastChild, [kept && `${capital(kept)}.`, node.remedy && `Next: ${node.remedy}`].filter(Boolean).join(" "));
  put(node.querySelector("p"), fit ? whose(fit) + summary(fit, node.now) : "");
  sync(
    node.querySelector(".facts"),
    figures(fit ? evidence.filter(([key]) => !SAID.includes(key)) : evidence),
    ([term]) => term,
    ([term]) => make("div", make("dt", term), make("dd")),
    (entry, [, value]) => put(entry.lastChild, value),
  );
  const text = JSON.stringify(fit);
  if (!fit || node.drawn === text) return;
  node.drawn = text;
  const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": summary(fit) });
  drawing.append(...Object.entries(shapes(fit)).map(([kind, d]) => svg("path", { class: kind, d })));
  const { from, to, high, full } = limits(fit);
  const plot = node.querySelector(".plot");
  plot.querySelector("svg")?.remove();
  plot.prepend(drawing);
  put(plot.querySelector(".top"), full === null ? sizeText(high) : `${sizeText(full)}${pid ? " of this program" : ""}: the GPU is full`);
  put(plot.querySelector(".from"), clock(from, to));
  put(plot.querySelector(".to"), clock(to));
  const sentences = fit.ruled_out.map(({ kind, reason, value }) => `Ruled out: ${kind} (${reason}: ${value.toFixed(2)}).`);
  node.querySelector(".ruled-out").replaceChildren(...sentences.map((sentence) => make("li", named(sentence, 400))));
}

/** The program whose points are drawn, if it is another one of the group than the verdict's. */
function whose({ device_uuid: uuid, pid }) {
  if (!uuid) return "";
  const device = state.devices.get(uuid);
  return `Curve of pid ${pid ?? "?"} on ${device ? label(device) : clean(uuid, 80)}, the first device that is full: `;
}
