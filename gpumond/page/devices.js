// Devices: their memory as a bar, sensors, conditions, history and flush. Many devices are rows or tiles, and those that
// the user chooses are shown in full below.

import * as address from "./address.js";
import { bar, shares, showBar, showThinBar, thinBar } from "./bars.js";
import { createChart } from "./chart.js";
import { $, button, make, name, put, sync } from "./elements.js";
import { flush } from "./flush.js";
import { human, percent, sum, words } from "./format.js";
import { DEVICE_COLUMNS, devicesOf, indexesOf, layoutOf, stateOf, tileLabel, totalOf, usedShare } from "./matrix.js";
import { MEANINGS } from "./meanings.js";
import { estimate, label, linesOf, reclaimable, roots, state } from "./store.js";
import { createSpark, showSpark } from "./spark.js";
import { showProcessesOf } from "./table.js";
import { SHARES } from "./words.js";

const CHOSEN = 4; // devices of rows or tiles that are shown in full at the same time

let chosen = indexesOf(address.read("gpu"), CHOSEN); // indexes of the devices whose history is shown

const classesOf = ({ number, wide }) => [number && "number", wide && "wide"].filter(Boolean).join(" ");

const isChosen = (device) => chosen.includes(String(device.index));

function choose(device) {
  const index = String(device.index);
  chosen = isChosen(device) ? chosen.filter((each) => each !== index) : [...chosen, index].slice(-CHOSEN);
  address.write("gpu", chosen.join(","));
  showDevices();
}

/** Shows a device in full, and moves the focus to it. */
export function showDevice(device) {
  if (!isChosen(device)) choose(device);
  const node = $("devices").kept.get(device.uuid);
  node.scrollIntoView({ block: "nearest" });
  node.querySelector("h3 button").focus();
}

function createDevice(device) {
  const opener = button("", () => choose(device), "button.plain");
  opener.append(make("span"), " ", make("bdi"));
  opener.title = "Show or hide history";
  const list = button("Processes", () => {
    showProcessesOf(String(device.index));
    $("processes-title").scrollIntoView();
  });
  list.setAttribute("aria-label", `Processes of ${label(device)}`);
  return make(
    "article.device",
    make("div.head", make("h3", opener), make("span.total"), make("span.state")),
    bar(),
    make("div.head", make("dl.legend"), make("span.sensors")),
    make("div.foot", make("span.estimate"), list, button("Flush…", () => flush({ device: device.uuid }, label(device)))),
    make("ul.conditions"),
  );
}

function showLegend(node, device, sums) {
  const { overcounts } = state.frame.ledger;
  const overcount = overcounts.find((each) => each.device_uuid === device.uuid)?.overcount_bytes;
  const entries = SHARES.filter((share) => sums[share]).map((share) => [share, sums[share]]);
  if (device.used_bytes !== null) entries.push(["free", device.free_bytes]);
  if (device.reserved_bytes) entries.push(["reserved", device.reserved_bytes]);
  if (overcount) entries.push(["overcount", overcount]);
  const unmapped = sum(state.frame.processes.map((each) => (each.device_uuid === device.uuid && each.unmapped_bytes) || 0));
  if (unmapped) entries.push(["unmapped", unmapped]);
  sync(
    node,
    entries,
    ([share]) => share,
    ([share]) => {
      const entry = make("div", make("dt", make(`i.${share}`), share), make("dd"));
      entry.title = MEANINGS[share];
      return entry;
    },
    (entry, [, bytes]) => put(entry.lastChild, human(bytes)),
  );
}

function sensors({ gpu_utilization_ratio: busy, gpu_temperature_celsius: heat, power_watts: power }) {
  const texts = [
    busy === null ? "" : `${Math.round(100 * busy)} % busy`,
    heat === null ? "" : `${Math.round(heat)} °C`,
    power === null ? "" : `${Math.round(power)} W`,
  ];
  return texts.filter(Boolean).join(" · ");
}

function updateDevice(node, device) {
  const lines = linesOf(device);
  const sums = shares(lines);
  const known = device.used_bytes !== null;
  const find = (query) => node.querySelector(query);
  const opener = find("h3 button");
  put(opener.firstElementChild, label(device));
  opener.setAttribute("aria-expanded", String(isChosen(device)));
  name(opener.lastChild, device.name, 80);
  const ratio = known && device.size_bytes ? ` · ${percent(device.used_bytes, device.size_bytes)}` : "";
  put(find(".total"), known ? `${human(device.used_bytes)} of ${human(device.size_bytes)} used${ratio}` : "");
  put(find(".state"), stateOf(device));
  node.classList.toggle("lost", !known);
  showBar(find(".bar"), sums, device.size_bytes, device.reserved_bytes ?? 0);
  find(".bar").classList.toggle("over", sum(Object.values(sums)) > (device.size_bytes ?? Infinity));
  showLegend(find(".legend"), device, sums);
  put(find(".estimate"), estimate(lines));
  put(find(".sensors"), sensors(device.sensors));
  const [list, flushes] = node.querySelectorAll(".foot button");
  const several = state.frame.snapshot.devices.length > 1;
  list.hidden = !several;
  flushes.hidden = !several || !find(".estimate").textContent;
  find(".foot").hidden = list.hidden && !find(".estimate").textContent;
  flushes.disabled = !reclaimable(lines).bytes;
  flushes.setAttribute("aria-label", `Flush ${label(device)}…`);
  sync(
    find(".conditions"),
    state.frame.conditions.filter((each) => each.device_uuid === device.uuid),
    (each) => each.kind + each.detail,
    () => make("li"),
    (entry, { kind, detail, remedy }) => put(entry, [words(kind), detail, remedy].filter(Boolean).join(": "), 600),
  );
}

function showHistory(node, device) {
  const chart = node.querySelector(".history");
  if (!isChosen(device)) chart?.remove();
  else if (!chart) node.append(createChart({ uuid: device.uuid, pid: null }));
}

function createRow({ device }) {
  const opener = button("", () => choose(device), "button.plain");
  opener.append(make("span"), " ", make("bdi"));
  const head = make("th", opener);
  head.scope = "row";
  const cells = DEVICE_COLUMNS.map((column) => {
    const cell = make("td", ...(column.spark ? [createSpark()] : []));
    cell.className = classesOf(column);
    return cell;
  });
  return make("tbody", make("tr", head, make("td", thinBar()), ...cells));
}

function updateRow(node, row) {
  const { device, sums } = row;
  const [head, first, ...cells] = node.firstChild.children;
  put(head.firstChild.firstElementChild, label(device));
  name(head.firstChild.lastChild, device.name, 80);
  head.firstChild.setAttribute("aria-expanded", String(isChosen(device)));
  showThinBar(first.firstChild, sums, device.size_bytes ?? 0);
  DEVICE_COLUMNS.forEach((column, place) => {
    if (column.spark) showSpark(cells[place].firstChild, device, state.frame.snapshot.taken_at);
    else name(cells[place], column.text(row), 120);
  });
  node.classList.toggle("lost", device.used_bytes === null);
}

function createTile({ device }) {
  const tile = button("", () => choose(device), "button.tile");
  tile.append(make("span"), make("span"), thinBar());
  return make("li", tile);
}

function updateTile(node, row) {
  const { device, sums, state: fault, verdict } = row;
  const tile = node.firstChild;
  put(tile.children[0], String(device.index));
  put(tile.children[1], usedShare(device));
  showThinBar(tile.children[2], sums, device.size_bytes ?? 0);
  tile.title = tileLabel(row);
  tile.setAttribute("aria-label", tileLabel(row));
  tile.setAttribute("aria-expanded", String(isChosen(device)));
  tile.classList.toggle("notable", fault !== "" || verdict !== "");
}

export function showDevices() {
  const { snapshot, ledger } = state.frame;
  const { devices } = snapshot;
  const layout = layoutOf(devices.length);
  const key = (row) => row.device.uuid;
  const rows = layout === "full" ? [] : devicesOf(state.frame);
  $("device-rows").hidden = layout !== "rows";
  $("tiles").hidden = layout !== "tiles";
  sync($("device-rows"), layout === "rows" ? rows : [], key, createRow, updateRow, { fixed: 1 });
  sync($("tiles"), layout === "tiles" ? rows : [], key, createTile, updateTile);
  const shown = layout === "full" ? devices : devices.filter(isChosen);
  const update = (node, device) => {
    updateDevice(node, device);
    showHistory(node, device);
  };
  sync($("devices"), shown, (device) => device.uuid, createDevice, update);
  const all = roots();
  const uuids = new Set(all.filter((device) => device.used_bytes !== null).map((device) => device.uuid));
  const lines = ledger.lines.filter((line) => uuids.has(line.device_uuid));
  put($("summary"), uuids.size > 1 ? `${totalOf(all)} ${estimate(lines, "Flushing all programs")}` : "");
  $("flush-all").hidden = !snapshot.reports.length;
  $("flush-all").disabled = !reclaimable(lines).bytes;
}

for (const column of DEVICE_COLUMNS) {
  const cell = make("th", column.title);
  cell.scope = "col";
  cell.className = classesOf(column);
  $("device-columns").append(cell);
}
$("flush-all").addEventListener("click", () => flush({ all: true }, "all programs"));
