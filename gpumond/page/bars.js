// Memory as a bar: one part for each share.

import { make } from "./elements.js";
import { sizeText, sum, words } from "./format.js";
import { CLAIMS } from "./shares.js";
import { SHARES } from "./words.js";

const PARTS = [...SHARES, ...Object.keys(CLAIMS), "reserved"];

/** The bar as the right edge of a chart: upright, the first share at the bottom. */
export function edge() {
  const node = make("div.edge", ...PARTS.map((part) => make(`div.${part}`)));
  node.setAttribute("role", "img");
  return node;
}

/** `top`: the bytes at the upper edge of the chart. */
export function showEdge(node, sums, top) {
  PARTS.forEach((part, place) => {
    const bytes = sums[part] ?? 0;
    node.children[place].style.height = `${top ? (100 * bytes) / top : 0}%`;
    node.children[place].title = bytes ? `${words(part)} ${sizeText(bytes)}` : "";
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

/** The parts as a background: each ends at its share of `size`. Claims are hatched: the free memory covers the rest. */
export function gradient(sums, size) {
  let end = 0;
  const stop = (bytes) => `0 ${Math.round((200 * (end += bytes)) / size) / 2}%`; // finer steps would only be drawn more often
  const parts = SHARES.filter((share) => sums[share] > 0 && size > 0).map((share) => `var(--${share}) ${stop(sums[share])}`);
  const claimed = size > 0 ? sum(Object.keys(CLAIMS).map((kind) => sums[kind] ?? 0)) : 0;
  const rest = claimed ? `transparent ${stop(claimed)}, var(--free) 0` : "transparent 0";
  if (!parts.length && !claimed) return "none";
  return `linear-gradient(to right, ${[...parts, rest].join(", ")})${claimed ? ", var(--hatch)" : ""}`;
}

function label(node, sums) {
  const shown = PARTS.filter((part) => part !== "reserved" && sums[part]).map((part) => `${words(part)} ${sizeText(sums[part])}`);
  const text = shown.join(", ") || "no memory in use";
  if (node.ariaLabel !== text) node.ariaLabel = text;
}
