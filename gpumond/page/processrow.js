// One row of the table of processes: a process on a device, or a group of them.

import { showThinBar, thinBar } from "./bars.js";
import { createChart } from "./chart.js";
import { isMarked, setMarked } from "./markedrows.js";
import { button, colored, make, name, put, sync } from "./elements.js";
import { facts } from "./processfacts.js";
import { flush } from "./flushdialog.js";
import { clean, sizeText, many } from "./format.js";
import { read } from "./live.js";
import { COLUMNS, kindOf } from "./processlist.js";
import { allowsFlush, hasAgent, hasPools, ordinary, processKey, state } from "./state.js";
import { createSuspension, updateSuspension } from "./suspend.js";
import { why } from "./views.js";
import { OF_PROCESSES, VERDICTS } from "./words.js";

const NARROW = matchMedia("(max-width: 1140px)"); // as in page.css

export const classesOf = ({ id, ...column }) => [`of-${id}`, ...["number", "wide", "medium"].filter((kind) => column[kind])].join(" ");

/** The body of a row for items of a kind. `toggle` is called with the key of the item when the user opens or closes it. */
export function createRow(kind, toggle) {
  const body = make(`tbody.${kind}`, make("tr"));
  const [head] = body.children;
  for (const column of COLUMNS) {
    const cell = make(column.id === "program" ? "th" : "td");
    cell.className = classesOf(column);
    head.append(cell);
  }
  const opener = button("", () => toggle(body.item.key), "button.plain");
  opener.append(make("bdi"));
  const program = head.querySelector(".of-program");
  const mark = button("✓", () => (mark.ariaPressed = setMarked(body.item, !isMarked(body.item))), "button.plain.mark");
  mark.tabIndex = -1;
  program.append(opener, make("span.state.quiet"), ...(kind === "group" ? [] : [mark]), thinBar());
  program.scope = "row";
  head.addEventListener("click", (event) => event.target.closest("button") || toggle(body.item.key));
  head.append(make("td.of-act"));
  if (kind === "group") return body;
  opener.title = "Show details";
  const act = () => flush({ pid: body.item.pid, start_ticks: body.item.start_ticks }, body.subject);
  head.lastChild.append(button("Flush…", act));
  return body;
}

/** Shows a row. `largest`: the bytes of a bar of full length. */
export function updateRow(body, item, { open, largest, active }) {
  body.item = item;
  const head = body.firstChild;
  const cells = head.children;
  const opener = head.querySelector("button");
  if (opener.ariaExpanded !== String(open)) opener.ariaExpanded = String(open);
  opener.tabIndex = active ? 0 : -1;
  const sums = Object.fromEntries(OF_PROCESSES.map((share) => [share, item[`${share}_bytes`] ?? 0]));
  showThinBar(opener.parentNode.lastChild, sums, largest);
  if (item.rows) updateGroup(cells, opener, item);
  else updateProcess(body, cells, opener, item, active);
  if (!item.rows) showDetails(body, item, open);
}

/** Why a flush of a row's program is impossible; empty if it isn't. */
export function refusalOf(row) {
  const { program, suspension, cached_bytes: cached } = row;
  const who = clean(program, 80);
  if (suspension) return `${who} is suspended.`;
  if (!hasAgent(row)) return `${who} runs no agent, so it can’t be flushed.`;
  if (!allowsFlush(row)) return `${who} doesn’t allow a flush.`;
  return cached ? "" : `${who} has nothing to flush: its cache is empty.`;
}

/** Shows a number, exactly on hover; nothing and 0 are dim. */
function putSize(cell, column, item) {
  put(cell, column.text(item));
  if (!column.bytes) return;
  const bytes = item[column.bytes];
  const tip = column.tip ? column.tip(item) : bytes ? `${bytes} B` : "";
  if (cell.title !== tip) cell.title = tip;
  cell.classList.toggle("zero", !bytes);
}

function updateGroup(cells, opener, group) {
  COLUMNS.forEach((column, place) => column.bytes && putSize(cells[place], column, group));
  name(opener.lastChild, group.title, 80);
  putVerdict(cells, group);
  name(opener.nextSibling, many(group.rows.length, "process", "processes"));
}

const cellOf = (cells, id) => cells[COLUMNS.findIndex((column) => column.id === id)];

function putVerdict(cells, { verdict, level }) {
  const cell = cellOf(cells, "verdict");
  if (cell.given !== verdict) cell.title = VERDICTS[verdict] ?? "";
  put(cell, verdict, 20);
  colored(cell, level);
}

function updateProcess(body, cells, opener, row, active) {
  const mark = body.querySelector(".mark");
  mark.ariaPressed = isMarked(row);
  mark.ariaLabel = `Compare ${clean(row.program, 80)}`;
  body.subject = `${row.program} (pid ${row.pid})`; // a program gets its name when its agent connects
  COLUMNS.forEach((column, place) => column.number && putSize(cells[place], column, row));
  name(opener.lastChild, row.program, 80);
  name(cellOf(cells, "user"), row.owner, 40);
  putVerdict(cells, row);
  const cut = NARROW.matches && row.verdict && !ordinary({ kind: row.verdict }) ? [row.verdict] : []; // has no column
  name(opener.nextSibling, [...cut, ...row.remarks].join(", "), 160);
  colored(opener.nextSibling, row.level || (row.remarks.length && "warn"));
  const flushes = cells[COLUMNS.length].firstChild;
  flushes.hidden = !hasAgent(row);
  flushes.title = refusalOf(row);
  flushes.disabled = Boolean(flushes.title);
  flushes.tabIndex = active ? 0 : -1;
  flushes.ariaLabel = `Flush ${clean(row.program, 80)}…`;
}

function showDetails(body, row, open) {
  if (!open) {
    body.children[1]?.remove();
    return;
  }
  if (!body.children[1]) body.append(createDetails(body, row));
  const shown = [...body.firstChild.children].filter((cell) => cell.checkVisibility()).length;
  if (body.lastChild.firstChild.colSpan !== shown) body.lastChild.firstChild.colSpan = shown; // more would be columns, too
  updateSuspension(body.querySelector(".suspension"), row);
  body.querySelector(".suspension").hidden = Boolean(state.past);
  const asks = body.querySelector(".why button");
  asks.parentNode.hidden = !hasPools(row) || Boolean(state.past);
  asks.setAttribute("aria-label", `Why… Memory of ${clean(row.program, 80)}…`);
  showFacts(body);
  if (hasAgent(row)) readReport(body);
}

/** Reads what only the details show of a program's report, for which the stream has no place. */
async function readReport(body) {
  if (body.reads) return;
  body.reads = true;
  const answer = await read(`api/v1/agents/${body.item.pid}`).catch(() => null);
  body.reads = false;
  if (!answer?.ok) return;
  body.report = await answer.json();
  if (body.children[1]) showFacts(body);
}

function showFacts(body) {
  const row = body.item;
  const report = body.report && processKey(body.report) === processKey(row) ? body.report : null;
  sync(
    body.querySelector(".facts"),
    [...facts(row, report, (state.past ?? state.frame).snapshot.taken_at)],
    ([term]) => term,
    ([term]) => make("div", make("dt", term), make("dd", make("bdi"))),
    (entry, [, value, repeated]) => {
      name(entry.lastChild.firstChild, value, 200);
      entry.classList.toggle("repeated", repeated === true);
    },
  );
}

function createDetails(body, row) {
  const asks = button("Why…", () => why(row.pid, body.subject));
  const chart = createChart({ uuid: row.device_uuid, pid: row.pid, start_ticks: row.start_ticks });
  const cell = make("td", chart, make("dl.facts"), make("p.why", asks), createSuspension(() => body.item));
  return make("tr.more", cell);
}

/** Makes rows that are no longer drawn show items that are new, in the order of both: moving no element is fast. */
export function reuse(kept, items) {
  const keys = new Set(items.map(({ key }) => key));
  const free = { group: [], process: [] };
  for (const [key, body] of kept)
    if (body.item && !keys.has(key) && !body.children[1] && !body.contains(document.activeElement))
      free[kindOf(body.item)].push([key, body]);
  for (const item of items.filter(({ key }) => !kept.has(key))) {
    const [key, body] = free[kindOf(item)].shift() ?? [];
    if (!body) continue;
    kept.delete(key);
    kept.set(item.key, body);
  }
}

/** A place without rows that are drawn. */
export function gap() {
  const node = make("tbody.gap", make("tr", make("td")));
  node.setAttribute("aria-hidden", "true");
  return node;
}
