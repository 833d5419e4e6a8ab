// The devices of a machine with several of them, as rows or tiles. The one that the user chooses is shown in the picture
// above.

import { showThinBar, thinBar } from "./bars.js";
import { $, button, colored, make, name, put, sync } from "./elements.js";
import { duration } from "./format.js";
import { DEVICE_COLUMNS, devicesOf, layoutOf, tileLabel, usedShare } from "./devicegrid.js";
import { choose, chosen } from "./selection.js";
import { claimedParts } from "./shares.js";
import { createSpark, secondsOf, showSpark } from "./recentuse.js";
import { claimsOfFrame, label, sharesOfFrame, state } from "./state.js";

const classesOf = (column) => ["number", "wide", "medium"].filter((kind) => column[kind]).join(" ");

const partsOf = (device, sums) => ({ ...sums, ...claimedParts(claimsOfFrame(), [device]) });

const isChosen = (device) => device === chosen();
/** Chooses a device, or all if it is chosen already. */
const pick = (device) => choose(isChosen(device) ? null : device);

function createRow({ device }) {
  const opener = button("", () => {}, "button.plain");
  opener.append(make("span"), " ", make("bdi"));
  const head = make("th", opener);
  head.scope = "row";
  const cells = DEVICE_COLUMNS.map((column) => {
    const cell = make("td", ...(column.spark ? [createSpark()] : []));
    cell.className = classesOf(column);
    return cell;
  });
  const body = make("tbody", make("tr", head, make("td", thinBar()), ...cells));
  body.addEventListener("click", () => pick(body.device));
  return Object.assign(body, { device });
}

function updateRow(node, row) {
  const { device, sums } = row;
  node.device = device;
  const [head, first, ...cells] = node.firstChild.children;
  put(head.firstChild.firstElementChild, label(device));
  name(head.firstChild.lastChild, device.name, 80);
  head.firstChild.setAttribute("aria-pressed", String(isChosen(device)));
  showThinBar(first.firstChild, partsOf(device, sums), device.size_bytes ?? 0);
  DEVICE_COLUMNS.forEach((column, place) => {
    if (column.spark) showSpark(cells[place].firstChild, device, state.frame.snapshot);
    else name(cells[place], column.text(row), 120);
    cells[place].classList.toggle("zero", ["0 B", "-"].includes(cells[place].given));
  });
  colored(cells.at(-1), row.level);
  node.classList.toggle("lost", device.used_bytes === null);
}

function createTile({ device }) {
  const tile = button("", () => pick(device), "button.tile");
  tile.append(make("span"), make("span"), thinBar());
  return make("li", tile);
}

function updateTile(node, row) {
  const { device, sums } = row;
  const tile = node.firstChild;
  put(tile.children[0], String(device.index));
  put(tile.children[1], usedShare(device));
  showThinBar(tile.children[2], partsOf(device, sums), device.size_bytes ?? 0);
  const text = tileLabel(row);
  if (tile.title !== text) tile.title = tile.ariaLabel = text;
  tile.ariaPressed = isChosen(device);
  colored(tile, row.level);
}

export function showDevices() {
  const layout = layoutOf(state.frame.snapshot.devices.length);
  const key = (row) => row.device.uuid;
  const rows = layout === "one" ? [] : devicesOf(state.frame, sharesOfFrame());
  $("devices-section").hidden = layout === "one";
  $("device-rows").hidden = layout !== "rows";
  $("tiles").hidden = layout !== "tiles";
  $("device-rows").classList.toggle("two", rows.length > 4);
  $("device-rows").style.setProperty("--half", Math.ceil(rows.length / 2));
  put($("spark-head"), duration(secondsOf(state.frame.snapshot)));
  sync($("device-rows"), layout === "rows" ? rows : [], key, createRow, updateRow, 1);
  sync($("tiles"), layout === "tiles" ? rows : [], key, createTile, updateTile);
}

for (const column of DEVICE_COLUMNS) {
  const cell = make("th", column.title);
  cell.scope = "col";
  cell.className = classesOf(column);
  if (column.spark) cell.id = "spark-head";
  $("device-columns").append(cell);
}
