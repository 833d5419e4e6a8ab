// Devices: their memory as a bar, sensors, conditions, history and flush.

import { toggle } from "./chart.js";
import { $, button, make, name, put, sync } from "./elements.js";
import { flush } from "./flush.js";
import { human, many, percent, sum, words } from "./format.js";
import { estimate, label, linesOf, reclaimable, roots, state } from "./store.js";
import { MISSED_LIMIT, SHARES } from "./words.js";

/** Bytes of each share, summed over ledger lines. */
function shares(lines) {
  const sums = {};
  for (const line of lines) sums[line.share] = (sums[line.share] ?? 0) + line.used_bytes;
  return sums;
}

export function bar() {
  const node = make("div.bar", ...SHARES.map((share) => make(`span.${share}`)), make("span.reserved"));
  node.setAttribute("role", "img");
  return node;
}

export function showBar(node, sums, size, reserved = 0) {
  [...SHARES, "reserved"].forEach((share, place) => {
    const bytes = share === "reserved" ? reserved : sums[share];
    const part = node.children[place];
    part.hidden = !bytes || !size;
    part.style.width = part.hidden ? "0" : `${(100 * bytes) / size}%`;
    part.title = part.hidden ? "" : `${share} ${human(bytes)}`;
  });
  const shown = SHARES.filter((share) => sums[share]).map((share) => `${share} ${human(sums[share])}`);
  const text = shown.join(", ") || "no memory in use";
  if (node.getAttribute("aria-label") !== text) node.setAttribute("aria-label", text);
}

function createDevice(device) {
  const opener = button("", () => toggle(node, node.target), "button.plain");
  opener.append(make("span"), " ", make("bdi"));
  opener.setAttribute("aria-expanded", "false");
  opener.title = "Show history";
  const history = make("div.history");
  history.hidden = true;
  const node = make(
    "article.device",
    make("div.head", make("h3", opener), make("span.total"), make("span.state")),
    bar(),
    make("div.head", make("dl.legend"), make("span.sensors")),
    make(
      "div.foot",
      make("span.estimate"),
      button("Flush…", () => flush({ device: device.uuid }, label(device))),
    ),
    make("ul.conditions"),
    history,
  );
  return node;
}

function condition(device) {
  const readings = many(device.missed, "reading");
  if (device.missed >= MISSED_LIMIT) return `${readings} missed: values are hidden`;
  if (device.missed) return `values are ${readings} old`;
  return device.up ? "" : "at fault";
}

function showLegend(node, device, sums) {
  const { overcounts } = state.frame.ledger;
  const overcount = overcounts.find((each) => each.device_uuid === device.uuid)?.overcount_bytes;
  const entries = SHARES.filter((share) => sums[share]).map((share) => [share, sums[share]]);
  if (device.used_bytes !== null) entries.push(["free", device.free_bytes]);
  if (device.reserved_bytes) entries.push(["reserved", device.reserved_bytes]);
  if (overcount) entries.push(["overcount", overcount]);
  const asleep = sum(state.frame.processes.map((each) => (each.device_uuid === device.uuid && each.unmapped_bytes) || 0));
  if (asleep) entries.push(["asleep", asleep]);
  sync(
    node,
    entries,
    ([share]) => share,
    ([share]) => make("div", make("dt", make(`i.${share}`), share), make("dd")),
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
  node.target = { uuid: device.uuid, pid: null };
  const find = (query) => node.querySelector(query);
  const opener = find("h3 button");
  put(opener.firstElementChild, label(device));
  name(opener.lastChild, device.name, 80);
  const ratio = known && device.size_bytes ? ` · ${percent(device.used_bytes, device.size_bytes)}` : "";
  put(find(".total"), known ? `${human(device.used_bytes)} of ${human(device.size_bytes)} used${ratio}` : "");
  put(find(".state"), condition(device));
  node.classList.toggle("lost", !known);
  showBar(find(".bar"), sums, device.size_bytes, device.reserved_bytes ?? 0);
  find(".bar").classList.toggle("over", sum(Object.values(sums)) > (device.size_bytes ?? Infinity));
  showLegend(find(".legend"), device, sums);
  put(find(".estimate"), estimate(lines));
  put(find(".sensors"), sensors(device.sensors));
  const flushes = find(".foot button");
  find(".foot").hidden = !find(".estimate").textContent;
  flushes.hidden = state.frame.snapshot.devices.length < 2;
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

export function showDevices() {
  const { snapshot, ledger } = state.frame;
  sync($("devices"), snapshot.devices, (device) => device.uuid, createDevice, updateDevice);
  const all = roots().filter((device) => device.used_bytes !== null);
  const uuids = new Set(all.map((device) => device.uuid));
  const lines = ledger.lines.filter((line) => uuids.has(line.device_uuid));
  const [used, size] = ["used_bytes", "size_bytes"].map((key) => human(sum(all.map((device) => device[key] ?? 0))));
  const total = `${used} of ${size} used on ${all.length} devices. ${estimate(lines, "Flushing all programs")}`;
  put($("summary"), all.length > 1 ? total : "");
  $("flush-all").hidden = !snapshot.reports.length;
  $("flush-all").disabled = !reclaimable(lines).bytes;
}

$("flush-all").addEventListener("click", () => flush({ all: true }, "all programs"));
