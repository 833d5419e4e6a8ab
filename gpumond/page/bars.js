// Memory as a bar: one part for each share.

import { make } from "./elements.js";
import { human } from "./format.js";
import { SHARES } from "./words.js";

/** The bar as the right edge of a chart: upright, the first share at the bottom. */
export function edge() {
  const node = make("div.edge", ...SHARES.map((share) => make(`div.${share}`)), make("div.reserved"));
  node.setAttribute("role", "img");
  return node;
}

/** `top`: the bytes at the upper edge of the chart. */
export function showEdge(node, sums, top, reserved) {
  [...SHARES, "reserved"].forEach((share, place) => {
    const bytes = share === "reserved" ? reserved : (sums[share] ?? 0);
    node.children[place].style.height = `${top ? (100 * bytes) / top : 0}%`;
    node.children[place].title = bytes ? `${share} ${human(bytes)}` : "";
  });
  label(node, sums);
}

/** A bar of one element, for lists: its parts are its background. */
export function thinBar() {
  const node = make("span.bar.thin");
  node.setAttribute("role", "img");
  return node;
}

export function showThinBar(node, sums, size) {
  const image = gradient(sums, size);
  if (node.image !== image) node.style.backgroundImage = node.image = image;
  label(node, sums);
  if (node.title !== node.ariaLabel) node.title = node.ariaLabel;
}

/** The parts as a background: each ends at its share of `size`. */
export function gradient(sums, size) {
  let end = 0;
  const parts = SHARES.filter((share) => sums[share] > 0 && size > 0).map((share) => {
    end += (100 * sums[share]) / size;
    return `var(--${share}) 0 ${Math.round(2 * end) / 2}%`; // finer steps would only be drawn more often
  });
  return parts.length ? `linear-gradient(to right, ${parts.join(", ")}, transparent 0)` : "none";
}

function label(node, sums) {
  const shown = SHARES.filter((share) => sums[share]).map((share) => `${share} ${human(sums[share])}`);
  const text = shown.join(", ") || "no memory in use";
  if (node.ariaLabel !== text) node.ariaLabel = text;
}
