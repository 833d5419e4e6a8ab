// The table of processes: order, filter, groups, and the rows that are drawn.

import * as address from "./address.js";
import { addChanges, baseOf, createRanges, showsChanges } from "./changes.js";
import { release } from "./chart.js";
import { $, button, labeled, make, put, showChoices, sync } from "./elements.js";
import { clock, many } from "./format.js";
import { classesOf, createRow, gap, refusalOf, reuse, updateRow } from "./processrow.js";
import { COLUMNS, FILTER, GROUPS, WAITING, addressOf, barBytes, connectedText, filled, find, groupKey, isAt, kindOf, listed, rowsOf } from "./processlist.js";
import { choose, chosen } from "./selection.js";
import { hasAgent, label, state } from "./state.js";
import { distanceOf, parts } from "./viewport.js";
import { keepFocus } from "./views.js";
import { MISSED_LIMIT } from "./words.js";

const LONG = 25; // rows above which only those are drawn that can be seen
const PAGE = 10; // rows that the keys PageUp and PageDown skip
const HEIGHT = 28; // of a row, until one is measured
const RESTS = 10_000; // milliseconds after which a pointer in the table no longer keeps the order

const [sortedBy, direction] = address.read("sort").split(",");
let order = COLUMNS.some(({ id }) => id === sortedBy) ? { id: sortedBy, up: direction === "up" } : { id: "used", up: false };
let filter = address.read("filter");
let group = Object.hasOwn(GROUPS, address.read("group")) ? address.read("group") : "";
let opening = address.read("open"); // rows to open in the first frame

const opened = new Set(); // keys of rows and groups
const heights = new Map(); // of the details of open rows, by key
let rows = []; // of the newest frame
let list = []; // rows and groups that the table lists
let active = ""; // key of the row that Tab reaches
let view = { from: 0, to: 0, row: HEIGHT }; // the part of the rows that can be seen, and the height of a row

const gpu = () => String(chosen()?.index ?? "");

/** What the table lists, for a download. Draws it first: a new frame changes a row's bytes before what follows from them. */
export function shownList() {
  showProcesses();
  return { list, order, filter, group, gpu: gpu(), opened: [...opened] };
}

export function showProcesses() {
  rows = rowsOf(state.past ?? state.frame);
  if (!state.past) addChanges(rows);
  const { devices } = state.frame.snapshot;
  openByAddress();
  for (const id of filled(rows, devices.length)) $("processes").classList.add(`has-${id}`); // it stays
  $("processes").classList.toggle("changes", showsChanges());
  put($("processes-title"), state.past ? `Processes at ${clock(state.past.snapshot.taken_at, state.frame.snapshot.taken_at)}` : "Processes");
  $("to-now").hidden = !state.past;
  arrange();
  const known = devices.some((device) => device.processes !== null && device.missed_readings < MISSED_LIMIT);
  $("processes").hidden = !rows.length;
  if (!rows.length) put($("shown"), known ? "No process uses a GPU." : "The processes are unknown.");
  put($("connected"), connectedText(state.frame));
  $("no-agents").hidden = Boolean(state.past) || rows.some(hasAgent) || !known || !rows.length || !find(rows, filter, gpu()).length;
}

let movedAt = -Infinity; // performance.now()
addEventListener("pointermove", ({ pointerType }) => pointerType === "touch" || (movedAt = performance.now()), { passive: true });
/** True if the pointer has moved in the last milliseconds. */
export const movedWithin = (time) => performance.now() - movedAt < time;

/** `reorder`: also while the pointer or the focus is in the table, where rows otherwise keep their places, which a text says. */
function arrange(reorder = false) {
  const found = find(rows, filter, gpu());
  const table = $("processes");
  const still = !reorder && table.querySelector(`${movedWithin(RESTS) ? "tbody:hover, " : ""}tbody:has(:focus-visible)`) !== null;
  const before = still ? list.map((item) => item.key) : [];
  list = listed(found, group, order, opened, before);
  const kept = before.length && listed(found, group, order, opened).some(({ key }, place) => key !== list[place].key);
  const all = found.length < rows.length || filter ? `${found.length} of ${rows.length}` : "";
  const groups = group && many(list.filter((item) => item.rows).length, "group");
  const empty = !found.length && rows.length > 0;
  const elsewhere = empty ? find(rows, filter).length : 0;
  const none = elsewhere ? `None on ${label(chosen())}, ${elsewhere} on other GPUs.` : `No process matches ${filter}.`;
  put($("shown"), empty ? none : [all, groups, kept ? "order kept while you are in the table" : "", baseOf(state.frame.snapshot)].filter(Boolean).join(", "));
  put($("no-match"), elsewhere ? "Show all GPUs" : "Remove the filter");
  $("no-match").hidden = !empty;
  draw();
}

function draw() {
  const table = $("processes");
  const scroller = document.scrollingElement;
  const long = list.length > LONG;
  table.parentNode.classList.toggle("long", long);
  $("to-events").hidden = !long;
  const focused = document.activeElement?.closest("#processes tbody")?.key;
  const pinned = focused === undefined ? -1 : list.findIndex(({ key }) => key === focused);
  const drawn = long
    ? parts({ count: list.length, size: view.row, extras: extras(), from: view.from, to: view.to, pinned })
    : list.map((_, at) => ({ place: at }));
  const items = drawn.filter((part) => !part.gap).map((part) => list[part.place]);
  if (!items.some(({ key }) => key === active)) active = items[0]?.key ?? "";
  const most = { group: 1, process: 1 };
  for (const item of list) most[kindOf(item)] = Math.max(most[kindOf(item)], barBytes(item));
  if (table.kept) reuse(table.kept, items);
  const top = pinned < 0 ? null : scroller.scrollTop;
  sync(
    table,
    drawn,
    (part) => (part.gap ? `gap ${part.after}` : list[part.place].key),
    (part) => (part.gap ? gap() : createRow(kindOf(list[part.place]), toggle)),
    (body, part) => {
      if (part.gap) {
        body.firstChild.style.height = `${part.gap}px`;
        return;
      }
      const item = list[part.place];
      Object.assign(body, { key: item.key, place: part.place });
      body.firstChild.ariaRowIndex = String(part.place + 2);
      updateRow(body, item, { open: opened.has(item.key), largest: most[kindOf(item)], active: item.key === active });
    },
    1,
  );
  // Chromium computes the layout when the row with the focus moves, before the gap after it exists
  if (top !== null && scroller.scrollTop !== top) scroller.scrollTop = top;
  table.ariaRowCount = String(list.length + 1);
  if (long) setTimeout(measure); // after the layout, which it reads
}

/** Places and heights of the details of open rows. */
const extras = () =>
  list.flatMap(({ key }, place) => (opened.has(key) && heights.has(key) ? [[place, heights.get(key)]] : []));

/** Reads the sizes on which the drawn part depends, and draws again if they changed. */
function measure() {
  if (list.length <= LONG || $("content").hidden) return;
  const table = $("processes");
  const before = JSON.stringify([view, [...heights]]);
  look();
  for (const more of table.querySelectorAll("tr.more")) heights.set(more.parentNode.key, more.offsetHeight);
  if (before !== JSON.stringify([view, [...heights]])) draw();
}

/** Reads which part of the rows can be seen. Returns where they begin in the window. */
function look() {
  const table = $("processes");
  const head = table.tHead.offsetHeight;
  const start = Math.round(table.getBoundingClientRect().top) + head;
  const row = table.querySelector("tbody:not(.gap) tr")?.offsetHeight || HEIGHT;
  view = { from: Math.max(0, head - start), to: Math.max(0, innerHeight - start), row };
  return start;
}

function toggle(key) {
  if (!opened.delete(key)) opened.add(key);
  heights.delete(key);
  active = key;
  const open = list.filter((item) => opened.has(item.key) && !item.rows);
  address.write("open", open.map((row) => addressOf(row, rows)).join(","));
  arrange(true);
}

function openByAddress() {
  if (!opening || !rows.length) return;
  const wanted = opening.split(",");
  for (const row of rows.filter((each) => wanted.some((one) => isAt(one, each)))) {
    opened.add(row.key);
    if (group) opened.add(groupKey(group, row));
  }
  opening = "";
}

/** Sorts by the column with this id, as a click on its head does. */
export const sortById = (id) => sortBy(COLUMNS.find((column) => column.id === id));

/** Groups by one of `GROUPS`, or by nothing. */
export function groupBy(name) {
  group = name;
  $("group").value = name;
  address.write("group", group);
  if (state.frame) arrange(true);
}

/** Lists only what contains these words. */
export function filterBy(words) {
  filter = words;
  address.write("filter", filter);
  if ($("filter").value.trim() !== filter) $("filter").value = filter;
  if (state.frame) arrange(true);
}

/** Lists everything. */
function filterNothing() {
  choose(null);
  filterBy("");
}

function sortNext() {
  const visible = COLUMNS.filter(({ id }) => $("columns").querySelector(`.of-${id}`)?.offsetParent);
  const at = visible.findIndex(({ id }) => id === order.id);
  sortBy(visible[(at + 1) % visible.length]);
}

function sortBy(column) {
  order = { id: column.id, up: order.id === column.id ? !order.up : !column.number };
  address.write("sort", `${order.id},${order.up ? "up" : "down"}`);
  showColumns();
  active = focusedBody()?.key ?? "";
  arrange(true);
}

function showColumns() {
  sync(
    $("columns"),
    [...COLUMNS, { id: "act", title: "" }],
    (column) => column.id,
    (column) => {
      if (!column.title) return make("td");
      const cell = make("th", button(column.title, () => sortBy(column), "button.plain"));
      if (column.hint) cell.title = column.hint;
      cell.scope = "col";
      return cell;
    },
    (cell, column) => {
      cell.className = classesOf(column);
      const sorted = column.id === order.id;
      if (column.title) cell.setAttribute("aria-sort", sorted ? (order.up ? "ascending" : "descending") : "none");
    },
  );
}

/** Opens the row with this key, and moves the focus to it. */
export function showProcess(key) {
  if (state.past) release();
  const row = rows.find((each) => each.key === key);
  if (!row) return;
  if (!find([row], filter, gpu()).length) filterNothing();
  if (group) opened.add(groupKey(group, row));
  if (!opened.has(key)) toggle(key);
  else arrange(true);
  if (list.length <= LONG) $("processes").parentNode.scrollIntoView({ block: "nearest" });
  focusOn(list.findIndex((item) => item.key === key));
}

/** Opens the row with this key, and suspends or resumes its program there, where the result is shown. */
export function suspendRow(key) {
  if (!opened.has(key) || !rows.some((row) => row.key === key)) showProcess(key);
  const act = $("processes").kept.get(key)?.querySelector(".suspension button");
  act?.focus();
  act?.click();
}

/** Moves the focus to a row, which is scrolled into view. */
function focusOn(place) {
  const at = Math.min(Math.max(place, 0), list.length - 1);
  const table = $("processes");
  active = list[at].key;
  if (list.length > LONG) {
    const top = look() + distanceOf(at, view.row, extras());
    const [first, last] = [table.tHead.offsetHeight, innerHeight - view.row];
    scrollBy(0, top < first ? top - first : Math.max(0, top - last));
    look();
  }
  draw();
  table.kept.get(active).querySelector("button").focus({ preventScroll: list.length > LONG });
}

const MOVES = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: PAGE, PageUp: -PAGE, Home: -Infinity, End: Infinity };
const ANYWHERE = ["j", "k"]; // keys that also act while no row has the focus

const focusedBody = () => document.activeElement?.closest("#processes tbody");

function move(event) {
  const body = focusedBody();
  if (!list.length || !(body || ANYWHERE.includes(event.key)) || event.target.closest(".more")) return false;
  focusOn(body ? body.place + MOVES[event.key] : Math.max(0, list.findIndex(({ key }) => key === active)));
  return true;
}

/** Calls `act` with the row that has the focus. It returns why it can't act, which is shown. */
function onRow(act) {
  const row = focusedBody()?.item;
  const group = state.past ? "To act on programs, first press Show now." : row?.rows && "First open the group with Enter, and choose a program in it.";
  put($("refusal"), (row ? group || act(row) : "First choose a program with j or k.") || "");
  return true;
}

const click = (selector) => void focusedBody().querySelector(selector).click();

function suspend(row) {
  if (row.suspended ? row.suspended === WAITING : row.suspendable) return void suspendRow(row.key);
  if (row.suspended) return `${row.program} is suspended already. To resume it, press Z.`;
  return `${row.program} can’t be suspended. For the reason, run: gpumond suspend --pid ${row.pid}`;
}

function resume(row) {
  if (row.suspended === WAITING) return `${row.program} waits to resume. To cancel that, press z.`;
  return row.suspended ? void suspendRow(row.key) : `${row.program} isn’t suspended.`;
}

function showNow() {
  release();
  keepFocus("#processes tbody button");
}

function flushShown() {
  if ($("hero-flush").disabled) put($("refusal"), "No program has anything to flush.");
  else $("hero-flush").click();
  return true;
}

function groupNext() {
  const names = ["", ...Object.keys(GROUPS).filter((name) => rows.some(GROUPS[name]))];
  groupBy(names[(names.indexOf(group) + 1) % names.length]);
  return true;
}

const KEYS = {
  ...Object.fromEntries(Object.keys(MOVES).map((key) => [key, move])),
  f: () => onRow((row) => refusalOf(row) || click(".of-act button")),
  F: flushShown,
  x: () => onRow(() => click(".of-program .mark")),
  z: () => onRow(suspend),
  Z: () => onRow(resume),
  s: () => sortNext() ?? true,
  r: () => sortById(order.id) ?? true,
  g: groupNext,
  Escape: () => (state.past ? (showNow() ?? true) : Boolean(filter || chosen()) && (filterNothing() ?? true)),
};

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || !(rows.length || event.key === "Escape")) return;
  if ($("content").hidden || event.target.closest("input, select, textarea, dialog")) return;
  put($("refusal"), "");
  if (KEYS[event.key]?.(event)) event.preventDefault();
});
$("filter").addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    filterBy("");
    $("filter").blur();
  } else if (["ArrowDown", "Enter"].includes(event.key) && list.length) {
    event.preventDefault();
    focusOn(0);
  }
});
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  if (list.length) focusOn(0);
});
$("to-now").addEventListener("click", showNow);
$("no-match").addEventListener("click", () => (find(rows, filter).length ? choose(null) : filterNothing()));
$("to-events").addEventListener("click", () => $("events").scrollIntoView());
addEventListener("scroll", () => requestAnimationFrame(measure), { passive: true });
addEventListener("resize", () => requestAnimationFrame(measure));
$("filter").value = filter;
$("filter").title = FILTER;
$("filter").addEventListener("input", () => filterBy($("filter").value.trim()));
$("group").parentNode.before(labeled("Change in", createRanges(showProcesses)));
showChoices($("group"), [["", "nothing"], ...Object.keys(GROUPS).map((name) => [name])], group);
$("group").addEventListener("change", () => groupBy($("group").value));
showColumns();
