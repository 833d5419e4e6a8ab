// The help dialog: what each share and verdict is, and the keys.

import { $, make, put } from "./elements.js";
import { words } from "./format.js";
import { FLUSH } from "./flushmeaning.js";
import { MEANINGS } from "./meanings.js";
import { FILTER } from "./processlist.js";
import { CLAIMS } from "./shares.js";
import { MARKS, VERDICTS } from "./words.js";

const KEYS = {
  "Ctrl K, :": "Search GPUs, programs, views and actions.",
  "/": `Filter processes, or the open view, where Enter opens the first row. ${FILTER}`,
  Escape: "Remove the filter, and show all GPUs; close a case.",
  "j k, ↑ ↓": "Next and previous program; Page Up and Down, Home and End skip rows.",
  Enter: "Open or close details.",
  s: "Sort by the next column.",
  r: "Reverse the order.",
  g: "Group by the next property.",
  "x c": "Mark for comparison; compare.",
  m: "In Compare, type the first moment, or now; Enter goes to the second.",
  f: "Plan and flush the program.",
  F: "Plan and flush the GPU, or all programs shown.",
  "z Z": "Suspend or resume the program; z also cancels a waiting resumption.",
  a: "Alerts.",
  p: "Pause or resume updates.",
  "In a chart": "← → move the crosshair; a click or Enter holds or releases it; + − or w s zoom (also the wheel, or drag a range); a d show earlier and later times; Escape shows the latest.",
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
  $("help-shares").replaceChildren(...entries({ ...MEANINGS, ...CLAIMS }, (part) => [make(`i.${part}`), words(part)]));
  put($("help-flush"), FLUSH, 600);
  $("help-verdicts").replaceChildren(...entries(VERDICTS, (kind) => [kind]));
  $("help-marks").replaceChildren(...entries(kindsBySign(), (sign) => [sign]));
  $("help-keys").replaceChildren(...entries(KEYS, (key) => [make("kbd", key)]));
  $("help-pace").hidden = $("caption").hidden;
  $("help").showModal();
  $("help-title").focus();
  $("help").scrollTop = 0;
}

$("help-open").addEventListener("click", showHelp);
$("help-close").addEventListener("click", () => $("help").close());
