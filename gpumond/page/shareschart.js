// The picture that the web UI opens with: the shares of the machine, or of a chosen device, over time. The bar of the ledger
// is its right edge, on the same scale.

import * as address from "./address.js";
import { edge, showEdge } from "./bars.js";
import { createChart, setTarget } from "./chart.js";
import { $, button, make, name, put, showChoices, sync } from "./elements.js";
import { flush } from "./flushdialog.js";
import { clock, duration, sizeText, percent, sum, words } from "./format.js";
import { stateOf } from "./devicegrid.js";
import { MEANINGS } from "./meanings.js";
import { holdMoment } from "./selectedtime.js";
import { suspensionSentence } from "./processlist.js";
import { CLAIMS, besides, claimedParts } from "./shares.js";
import { choose, chooseIndex, chosen } from "./selection.js";
import { claimsOfFrame, estimate, hasAgent, label, reclaimableOf, roots, sharesOfAll, state } from "./state.js";
import { openView } from "./views.js";
import { SHARES } from "./words.js";

const hidden = new Set(address.read("hide").split(",").filter((share) => SHARES.includes(share))); // shares
let chart = null;
let present = { sums: {}, size: 0, reserved: 0, entries: [] }; // of the newest frame
let past = null; // values at the crosshair, if there is one

/** The devices that are shown: the chosen one, or all that are not a part of another. */
function shown() {
  const one = chosen();
  return one ? [one] : roots();
}

/** Shows a device, or all, and moves the focus to the chart. */
export function showDevice(device) {
  choose(device);
  $("hero").scrollIntoView({ block: "nearest" });
  $("hero").querySelector(".plot").focus();
}

function sensors(devices) {
  const known = (key) => devices.map((device) => device.sensors[key]).filter((value) => value !== null);
  const [busy, heat, power] = ["gpu_utilization_ratio", "gpu_temperature_celsius", "power_watts"].map(known);
  const texts = [
    busy.length ? `${percent(sum(busy), busy.length)} busy` : "",
    heat.length ? `${Math.round(Math.max(...heat))} °C` : "",
    power.length ? `${Math.round(sum(power))} W` : "",
  ];
  return texts.filter(Boolean).join(" · ");
}

const total = (devices, key) => sum(devices.map((device) => device[key] ?? 0));

function entriesOf(devices, sums) {
  const uuids = new Set(devices.map((device) => device.uuid));
  const overcounts = state.frame.ledger.overcounts.filter((each) => uuids.has(each.device_uuid));
  const extra = {
    ...(devices.some((device) => device.reserved_bytes !== null) && { reserved: total(devices, "reserved_bytes") }),
    overcount: total(overcounts, "overcount_bytes"),
  };
  const known = devices.filter((device) => device.used_bytes !== null);
  if (!known.length) return [];
  const free = known.every((device) => device.free_bytes !== null) ? [["free", total(known, "free_bytes")]] : [];
  const claimed = Object.entries(claimedParts(claimsOfFrame(), known)).filter(([, bytes]) => bytes);
  return [...Object.entries(extra), ...free, ...claimed, ...[...SHARES].reverse().map((share) => [share, sums[share] ?? 0])];
}

/** A button that hides a share in the picture, or shows it again. */
function toggle(share, sign) {
  const node = button("", () => {
    if (!hidden.delete(share)) hidden.add(share);
    address.write("hide", [...hidden].join(","));
    chart.redraw();
    showHero();
  }, "button.plain");
  node.append(...sign);
  return node;
}

/** The bytes of each share, or what is known of them at the crosshair. */
function showLegend() {
  sync(
    $("hero").querySelector(".legend"),
    present.entries,
    ([share]) => share,
    ([share]) => {
      const sign = [make(`i.${share}`), CLAIMS[share] ? `of which ${words(share)}` : share];
      const term = make("dt", ...(SHARES.includes(share) ? [toggle(share, sign)] : sign));
      const entry = make("div", term, make("dd"));
      entry.title = MEANINGS[share] ?? CLAIMS[share];
      return entry;
    },
    (entry, [share, now]) => {
      const bytes = past ? past[share] : now;
      put(entry.lastChild, sizeText(bytes));
      const opener = entry.querySelector("button");
      if (opener) opener.ariaPressed = String(!hidden.has(share));
      entry.classList.toggle("none", !bytes);
      entry.hidden = !bytes && (share === "overcount" || CLAIMS[share] !== undefined);
    },
  );
}

function titleOf(devices) {
  if (devices.length === 1) return [label(devices[0]), devices[0].name];
  const names = [...new Set(devices.map((device) => device.name))];
  return [`${devices.length} GPUs`, names.length === 1 ? names[0] : ""];
}

function totalText(devices) {
  const known = devices.filter((device) => device.used_bytes !== null);
  if (!known.length) return "";
  const [used, size] = [total(known, "used_bytes"), total(known, "size_bytes")];
  return `${sizeText(used)} of ${sizeText(size)} used${size ? ` · ${percent(used, size)}` : ""}`;
}

function showChoice(devices) {
  const all = state.frame.snapshot.devices;
  const choices = [["", "All GPUs"], ...all.map((device) => [String(device.index), label(device)])];
  showChoices($("hero-of"), choices, String(chosen()?.index ?? ""));
  $("hero-of").parentNode.hidden = all.length < 2;
}

/** Who holds or is granted the memory that a request waits for. */
export const holdersText = (holders) => holders.map((each) => `${each.workload || `pid ${each.pid}`} ${heldText(each)}`).join(", ");
const heldText = ({ used_bytes: used, granted_bytes: granted }) =>
  [used || !granted ? `uses ${sizeText(used)}` : "", granted ? `is granted ${sizeText(granted)}` : ""].filter(Boolean).join(" and ");

/** The state of a request or grant in the words of `gpumond status`: the program, and the rest of the sentence. */
function sentenceOf({ device_uuid: uuid, workload, pid, user, need_bytes: need, available_bytes: available, missing_bytes: missing, unused_bytes: unused, holders = [], ahead, since }, of, now) {
  const [first, ...more] = [workload, pid === null ? "" : `pid ${pid}`, user].filter(Boolean);
  if (unused) {
    const { free_bytes: free } = state.devices.get(uuid);
    const short = free === null || free >= unused ? "" : `; only ${sizeText(free)} is free`;
    return [first, `${more.length ? `(${more.join(", ")}) ` : ""}is granted ${sizeText(need)} of ${of}; ${sizeText(unused)} of it isn't used yet${short}`];
  }
  const flushed = available === null ? 0 : need - available - missing;
  const room = available === null ? "" : `${sizeText(Math.max(0, available))} is available, ${flushed > 0 ? `flushes would release ${sizeText(flushed)}, ` : ""}and `;
  const claimed = ahead && available !== null && available < 0; // by earlier requests, more than there is
  const rest = [
    more.length ? `(${more.join(", ")}) ` : "",
    `has been waiting ${duration(Math.max(0, now - since))} for ${sizeText(need)} on ${of}`,
    ahead ? `, behind ${ahead}` : "",
    missing && !claimed ? `; ${room}${sizeText(missing)} ${flushed > 0 ? "would still be" : "is"} missing` : "",
    holders.length ? `; ${holdersText(holders)}` : "",
  ];
  return [first, rest.join("")];
}

/** Requests for memory of these devices that wait, or are granted and not used completely, the suspended programs that
wait for nothing, and reserves of quotas. Each has the sign of its part in the bars. */
function showQueue(devices) {
  const of = new Map(devices.map((device) => [device.uuid, label(device)]));
  const { queue, grants, snapshot } = state.frame;
  const waits = (program) => queue.some(({ id }) => program.grants.includes(id));
  const suspended = snapshot.suspended_programs.filter((each) => !waits(each) && each.memory.some(({ device_uuid: uuid }) => of.has(uuid)));
  const reserves = claimsOfFrame().filter(({ kind, uuid }) => kind === "quota-reserve" && of.has(uuid));
  sync(
    $("hero-queue"),
    [...[...queue, ...grants].filter((each) => of.has(each.device_uuid)), ...reserves, ...suspended],
    (each) => each.id ?? each.uuid + each.name,
    ({ name: quota }) => {
      const opener = button("", () => openView(quota ? "quotas" : "queue"), "button.plain");
      opener.append(make("bdi"));
      return make("li", make("i"), make("b", opener), " ", make("bdi"));
    },
    (entry, each) => {
      const kind = each.kind ?? (each.memory ? "suspended" : each.unused_bytes ? "granted" : "waiting");
      const [program, rest] = each.kind
        ? [each.name, `reserves ${sizeText(each.bytes)} of ${of.get(each.uuid)} that its programs aren't using`]
        : each.memory
          ? [each.workload || `pid ${each.pid}`, `(pid ${each.pid}): ${suspensionSentence(state.frame, each)}`]
          : sentenceOf(each, of.get(each.device_uuid), snapshot.taken_at);
      Object.assign(entry.firstChild, { className: kind, title: CLAIMS[kind] });
      name(entry.querySelector("bdi"), program, 80);
      name(entry.lastChild, rest, 400);
    },
  );
}

function showConditions(devices) {
  const of = new Map(devices.map((device) => [device.uuid, devices.length > 1 ? `${label(device)}: ` : ""]));
  sync(
    $("hero-conditions"),
    state.frame.conditions.filter((each) => of.has(each.device_uuid)),
    (each) => each.device_uuid + each.kind + each.detail,
    () => make("li"),
    (entry, { device_uuid: uuid, kind, detail, remedy }) =>
      put(entry, of.get(uuid) + [words(kind), detail, remedy].filter(Boolean).join(": "), 600),
  );
}

export function showHero() {
  const devices = shown();
  const article = $("hero");
  const sums = sharesOfAll(devices);
  const flushed = reclaimableOf(devices);
  const known = devices.some((device) => device.used_bytes !== null);
  const [title, model] = titleOf(devices);
  article.hidden = !devices.length;
  put($("hero-title").firstElementChild, title);
  name($("hero-title").lastElementChild, model, 80);
  put(article.querySelector(".total"), totalText(devices));
  put(article.querySelector(".state"), devices.length === 1 ? stateOf(devices[0]) : "");
  put(article.querySelector(".sensors"), known ? sensors(devices) : "");
  article.classList.toggle("lost", !known);
  const parts = estimate(flushed);
  article.querySelectorAll(".estimate > :not(button)").forEach((part, place) => put(part, parts[place]));
  $("hero-flush").hidden = !state.frame.processes.some(hasAgent);
  $("hero-flush").disabled = !flushed.bytes;
  put($("hero-flush"), state.frame.snapshot.devices.length > 1 && devices.length === 1 ? `Flush ${title}…` : "Flush all…");
  showChoice(devices);
  showQueue(devices);
  showConditions(devices);
  present = { sums, size: total(devices, "size_bytes"), reserved: total(devices, "reserved_bytes"), entries: entriesOf(devices, sums) };
  showLegend();
  if (devices.length) showChart({ uuid: devices.length === 1 ? devices[0].uuid : "", pid: null });
}

function showChart(target) {
  if (!chart) {
    chart = createChart(target, { drawn: drawEdge, pointed: showMoment, hidden });
    chart.plot.append(edge());
    $("hero").querySelector(".stage").prepend(chart);
  }
  setTarget(chart, target);
  drawEdge();
}

/** Shows the values at the crosshair in the legend, or the present ones. */
function showMoment(at = null, interval = null, held = false) {
  holdMoment(held ? at : null);
  const closed = (chart.range?.to ?? null) !== null;
  $("hero").classList.toggle("past", closed || at !== null);
  $("hero").querySelector(".side").dataset.at = at === null ? (closed ? "now" : "") : clock(at, state.frame.snapshot.taken_at);
  if (!past && !interval) return;
  past = interval && { ...(interval.at && besides(interval, chart.view.size, present.reserved)), ...interval };
  showLegend();
  drawEdge();
}

/** Draws the bar on the scale of the chart, at the crosshair if there is one. */
function drawEdge() {
  const sums = Object.fromEntries(Object.entries(past ?? { ...present.sums, ...claimedParts(claimsOfFrame(), shown()) }).filter(([share]) => !hidden.has(share)));
  showEdge(chart.plot.querySelector(".edge"), { ...sums, reserved: present.reserved }, chart.view?.top ?? present.size);
}

function flushShown() {
  const devices = shown();
  if (devices.length === 1 && state.frame.snapshot.devices.length > 1) flush({ device: devices[0].uuid }, label(devices[0]));
  else flush({ all: true }, "all programs");
}

$("hero-flush").addEventListener("click", flushShown);
$("hero-of").addEventListener("change", () => chooseIndex($("hero-of").value));
