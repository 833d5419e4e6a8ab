// The help dialog: what each share is, and the keys.

import { $, make, put } from "./elements.js";
import { words } from "./format.js";
import { FLUSH, MEANINGS } from "./meanings.js";
import { MARKS } from "./words.js";

const KEYS = {
  "Ctrl K, :": "Search devices, programs, views and actions.",
  "/": "Filter processes.",
  "↑ ↓, j k": "Previous or next row of the table; Page Up, Page Down, Home and End move further.",
  Enter: "Open or close a row.",
  Space: "Pause or resume.",
  "← →": "Move the crosshair in all charts.",
  "+ −, w s": "Zoom a chart (as the wheel does); drag to select a range.",
  "a d": "Move a chart to earlier or later times.",
  Escape: "Show the latest values in a chart.",
  "?": "This help.",
};

const entries = (texts, head) => Object.entries(texts).map(([term, text]) => make("div", make("dt", ...head(term)), make("dd", text)));

function kindsBySign() {
  const kinds = {};
  for (const [kind, sign] of Object.entries(MARKS)) kinds[sign] = [kinds[sign], words(kind)].filter(Boolean).join(", ");
  return kinds;
}

function showHelp() {
  if ($("help").open) return;
  $("help-shares").replaceChildren(...entries(MEANINGS, (share) => [make(`i.${share}`), share]));
  put($("help-flush"), FLUSH, 600);
  $("help-marks").replaceChildren(...entries(kindsBySign(), (sign) => [sign]));
  $("help-keys").replaceChildren(...entries(KEYS, (key) => [make("kbd", key)]));
  $("help").showModal();
}

$("help-open").addEventListener("click", showHelp);
$("help-close").addEventListener("click", () => $("help").close());
document.addEventListener("keydown", (event) => {
  if (event.key !== "?" || event.target.closest("input, select, textarea, dialog")) return;
  event.preventDefault();
  showHelp();
});
