// The view of cases of out-of-memory errors: the chosen one, and the list of all.

import * as address from "./address.js";
import { callText, ownCalls, siteText } from "./calls.js";
import { button, make, named, svg } from "./elements.js";
import { flush } from "./flushdialog.js";
import { capital, clean, clock, duration, sizeText, sum } from "./format.js";
import { createListing, createTable, showTable } from "./viewtables.js";
import { state } from "./state.js";
import { read } from "./live.js";
import { addView, isOpen, reload } from "./views.js";

const ENOUGH = { true: "yes", false: "no" };
const NOTHING = "nothing"; // the name of what is listed if no remedy is enough: no remedy

const now = () => state.frame.snapshot.taken_at;
const programOf = ({ workload, pid }) => `${workload || "a program"} (pid ${pid})`;
const gpuOf = ({ device_uuid: uuid }) => (state.devices.has(uuid) ? `GPU ${state.devices.get(uuid).index}` : "");
const rowOf = ({ workload, pid }) => (pid === null ? workload || "unattributed" : `${workload || "pid"} ${pid}`);
const bytes = (title, key) => ({ title, text: (row) => sizeText(row[key]), number: true });
const plain = (title, text) => ({ title, text });

const COLUMNS = [
  plain("Time", ({ at }) => clock(at, now())),
  { title: "Program", text: programOf, name: true },
  { title: "GPU", text: gpuOf, name: true },
  { title: "Errors", text: ({ errors }) => String(errors), number: true },
  bytes("Missing", "missing_bytes"),
  { title: "Remedy", text: ({ remedy }) => remedy, long: true },
  { title: "Actions", nodes: () => [make("a", "Case")], update: showLink },
];

function showLink(cell, { id, ...found }) {
  cell.firstChild.href = address.linkTo({ view: "cases", case: id });
  cell.firstChild.ariaLabel = clean(`Case of ${programOf(found)}`, 100);
}

const REMEDIES = [
  plain("Remedy", ({ text }) => text),
  { title: "Bytes", text: ({ size_bytes: size, basis }) => `${basis === "estimate" && size !== null ? "about " : ""}${sizeText(size)}`, number: true },
  plain("Enough alone", ({ enough }) => ENOUGH[enough] ?? "unknown"),
  plain("Known from", ({ source }) => source),
  { title: "", nodes: (row) => [button("Flush…", () => row.item.flush())], update: (cell, { flush: act }) => (cell.firstChild.hidden = !act) },
];

/** The time of the program's own figures: it may have freed memory since an error that only a counter shows. */
const knownAt = ({ seen }) => (seen === "counter" ? "after the error" : "at the error");

/** When the lines of a case were measured, as `gpumond oom show` says it. */
function ledgerTitle({ at, oom, lines_at: measured, reported_at: reported }) {
  if (measured === null) return "GPU memory";
  const from = (time) => `${Math.abs(at - time).toFixed(1)} s ${time <= at ? "before" : "after"}`;
  const report = reported === null ? "" : ` (the program’s report: ${from(reported)})`;
  return `GPU memory ${from(measured)} the error${oom?.pools.length ? ` (this program’s rows: ${knownAt(oom)})` : report}`;
}

/** Tables of facts of a case: the title, the columns and the rows of each. */
function* tablesOf(found, ranks) {
  const { oom, lines, device_uuid: uuid, free_bytes: free, reserved_bytes: reserved, overcount_bytes: over } = found;
  if (oom) yield [`The program’s pools ${knownAt(oom)}`, [plain("Allocator", ({ allocator }) => allocator), ...["live", "cached", "stranded"].map((share) => bytes(capital(share), `${share}_bytes`))], oom.pools.filter((pool) => !uuid || pool.device_uuid === uuid)];
  const held = lines.filter((line) => line.used_bytes).sort((one, other) => other.used_bytes - one.used_bytes);
  if (held.length && reserved) held.push({ share: "reserved", used_bytes: reserved });
  if (held.length && free !== null) held.push({ share: "free", used_bytes: free });
  if (over) held.push({ share: "overcount", used_bytes: -over });
  yield [ledgerTitle(found), [plain("Program", (line) => (line.device_uuid ? rowOf(line) : "-")), plain("Share", ({ share }) => share), bytes("Bytes", "used_bytes")], held];
  const later = ({ seconds_later: seconds }) => `${seconds.toFixed(1)} s`;
  if (ranks.length > 1) yield ["Order of the ranks", [plain("Rank", ({ rank }) => String(rank)), plain("PID", ({ pid }) => String(pid)), plain("Later", later)], ranks];
  if (!oom) return;
  for (const one of oom.classes) {
    const known = Object.entries(one).filter(([key, value]) => /_bytes$/.test(key) && key !== "live_bytes" && value);
    yield [`Live memory of ${one.allocator} by class`, [plain("Class", ([key]) => key.replace("_bytes", "")), { title: "Bytes", text: ([, value]) => sizeText(value), number: true }], known];
  }
  yield ["Largest allocation sites", [bytes("Bytes", "size_bytes"), plain("Calls, innermost first", siteText)], oom.sites];
  yield ["Scopes that retain the most memory", [plain("Scope", ({ name: scope }) => scope), bytes("Bytes", "retained_bytes")], oom.scopes];
  yield ["Call stack at the error, innermost call first", [plain("Call", callText)], ownCalls(oom.stack)];
}

const hue = (place) => `hsl(${(225 + 67 * place) % 360} 50% 55%)`;

/** The memory of each program over time, stacked, with the request on top, and the size. An unknown value has no height. */
function drawTimeline({ at, curves }, { at: failed, request_bytes: request, free_bytes, reserved_bytes: reserved, device_uuid: uuid, limit_bytes: limit }) {
  const free = limit ? null : free_bytes;
  const sums = at.map((_, place) => sum(curves.map(({ used_bytes: used }) => used[place] ?? 0)));
  const { size_bytes: size = null } = state.devices.get(uuid) ?? {};
  const usable = limit ?? (size === null ? null : size - (reserved ?? 0));
  const asked = request === null ? null : (usable === null || free === null ? sums.at(-1) : usable - free) + request;
  const top = Math.max(1, ...sums, usable ?? 0, asked ?? 0);
  const [from, to] = [at[0], at.at(-1)];
  const x = (place) => ((1000 * (at[place] - from)) / Math.max(1, to - from)).toFixed(2);
  const y = (value) => (100 - (100 * value) / top).toFixed(2);
  const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `Memory by program in the last ${duration(to - from)} before the error, at most ${sizeText(top)}` });
  const keys = make("div.keys");
  let base = at.map(() => 0);
  curves.forEach((curve, place) => {
    const upper = base.map((low, step) => low + (curve.used_bytes[step] ?? 0));
    const edge = [...upper.map((value, step) => `${x(step)} ${y(value)}`), ...base.map((value, step) => `${x(step)} ${y(value)}`).reverse()];
    const area = svg("path", { d: `M${edge.join("L")}Z` });
    const sign = make("i");
    area.style.fill = sign.style.background = hue(place);
    drawing.append(area);
    keys.append(make("span", sign, named(rowOf(curve), 80)));
    base = upper;
  });
  for (const [kind, bytes, text] of [["size", usable, `${limit ? "limit" : "usable"} ${sizeText(usable)}`], ["bound", asked, `with the request ${sizeText(asked)}`]]) {
    if (bytes === null) continue;
    drawing.append(svg("path", { class: kind, d: `M0 ${y(bytes)}H1000` }));
    keys.append(make("span", make(`i.${kind}`), named(text)));
  }
  if (free !== null) keys.append(named(`${sizeText(free)} free at the error`));
  const plot = make("div.plot", drawing, make("span.top", sizeText(top)), make("span.from", clock(from, now())), make("span.to", `${clock(failed, now())}, the error`));
  return [make("h3", `The ${limit ? "program" : "GPU"} before the error`), plot, keys];
}

function table(title, columns, rows) {
  const found = createTable(title, columns);
  found.classList.toggle("wrapping", columns === REMEDIES); // the others are narrow
  showTable(found, rows, (row) => row);
  return found;
}

/** What the summary doesn't state. */
function factsOf(found) {
  const { oom, missing_bytes: missing, errors } = found;
  const facts = [errors > 1 && `last of ${errors} errors at this limit`, missing !== null && `${errors > 1 ? "up to " : ""}${sizeText(missing)} was missing`, oom?.scope && `in ${oom.scope}`];
  return capital(facts.filter(Boolean).join(" · "));
}

/** Everything that is known of a case. */
function documentOf({ case: found, ranks }) {
  const what = found.limit_bytes ? `reached its limit of ${sizeText(found.limit_bytes)}` : "ran out of memory";
  const title = make("div.title", make("h2", named(`${programOf(found)} ${what}${gpuOf(found) && ` on ${gpuOf(found)}`}`, 160)), make("time", clock(found.at, now())));
  const save = make("a", "Save as HTML");
  save.href = `api/v1/oom/${encodeURIComponent(found.id)}/report`;
  save.download = `case-${found.id}.html`;
  const chart = make("a", "Chart");
  const device = state.devices.get(found.device_uuid);
  if (device) chart.href = address.linkTo({ gpu: device.index, range: `${Math.round(found.at - 300)}-${Math.round(found.at + 60)}` });
  title.append(make("div.controls", ...(device ? [chart] : []), save));
  const none = found.remedies.find(({ name }) => name === NOTHING);
  const remedies = found.remedies.filter((remedy) => remedy !== none).map((remedy) => ({ ...remedy, flush: remedy.name === "neighbor-cache" && device && (() => flush({ device: device.uuid }, gpuOf(found))) }));
  const parts = [...tablesOf(found, ranks)].filter(([, , rows]) => rows.length);
  const grid = make("div.compared", ...parts.map(([heading, columns, rows]) => make("div.part", make("h3", heading), table(heading, columns, rows))));
  const drawn = found.timeline.at.length > 1 ? drawTimeline(found.timeline, found) : [];
  const enough = [...(none ? [make("p", named(`${capital(none.text)}.`, 400))] : []), ...(remedies.length ? [make("div.part", table("Remedies", REMEDIES, remedies))] : [])];
  return [title, make("p", named(`${found.summary}.`, 800)), make("p", named(factsOf(found), 400)), ...enough, ...drawn, grid];
}

const NONE = "No program with an agent has run out of memory. A case shows what used the GPU’s memory, and what would have prevented the error.";
const chosen = make("section.case");
let listing;
let shown = ""; // id of the case that is drawn

function create() {
  chosen.hidden = true;
  listing = createListing("Cases", COLUMNS, ({ id }) => id, (found) => found, NONE);
  return make("div", chosen, listing);
}

async function load() {
  const answer = await read("api/v1/oom");
  if (answer.ok) listing.show((await answer.json()).reverse());
  const id = address.read("case");
  chosen.hidden = !id;
  if (!id || id === shown) return;
  const found = await read(`api/v1/oom/${encodeURIComponent(id)}`);
  const missing = () => make("p.refused", `Case ${clean(id, 60)} doesn’t exist or has been removed; choose one from the list.`);
  chosen.replaceChildren(...(found.ok ? documentOf(await found.json()) : [missing()]));
  shown = id;
}

document.addEventListener("keydown", ({ key, target }) => {
  if (key !== "Escape" || !isOpen("cases") || target.closest("input, dialog")) return;
  address.write("case", "");
  reload();
});
addView("cases", create, load);
