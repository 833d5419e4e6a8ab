// Declared serving engines: their state, models, requests, and the use of their KV cache.

import { $, make, name, put, sync } from "./elements.js";
import { duration, human, percent, sum } from "./format.js";
import { processKey, state } from "./state.js";
import { NOT_READ } from "./words.js";

const count = (value) => (value === null ? "-" : String(value));
const idle = (seconds) => (seconds === null ? "-" : duration(seconds));

const COLUMNS = [
  { id: "name", title: "Engine", text: (engine) => engine.name },
  { id: "kind", title: "Kind", text: (engine) => engine.kind, wide: true },
  { id: "condition", title: "State", text: condition },
  { id: "models", title: "Models", text: models, wide: true },
  { id: "used", title: "Used", text: (engine) => human(used(engine)), number: true },
  { id: "kv-cache", title: "KV cache in use", text: kvCache, number: true },
  { id: "running", title: "Running", text: (engine) => count(engine.running), number: true, wide: true },
  { id: "waiting", title: "Waiting", text: (engine) => count(engine.waiting), number: true, wide: true },
  { id: "idle", title: "Idle", text: (engine) => idle(engine.idle_seconds), number: true, wide: true },
];

function condition(engine) {
  if (engine.problem === NOT_READ) return NOT_READ;
  if (!engine.up) return `can't be read: ${engine.problem}`;
  const problem = engine.processes_problem && `; its processes are unknown: ${engine.processes_problem}`;
  return `${service(engine)}${problem}`;
}

function service(engine) {
  if (engine.out_of_service_seconds !== null) {
    return `out of service for ${duration(engine.out_of_service_seconds)}: ${engine.out_of_service_reason}`;
  }
  return engine.sleeping ? "sleeping" : engine.paused ? "paused" : "serving";
}

function models(engine) {
  const known = engine.models.map((model) =>
    model.size_bytes === null ? model.name : `${model.name} (${human(model.size_bytes)})`,
  );
  return known.join(", ") || "-";
}

const processesOf = (engine) => state.frame.processes.filter((process) => engineOf(process) === engine);

/** The driver's count for its processes; null if it is unknown. */
function used(engine) {
  const known = processesOf(engine).filter((process) => process.used_bytes !== null);
  return known.length ? sum(known.map((process) => process.used_bytes)) : null;
}

/** The size of the KV cache; null if it is unknown, or cannot be a part of these bytes. */
function kvCacheBytes(engine, ofBytes) {
  const stated = engine.kv_cache_bytes;
  return stated && !engine.sleeping && stated <= (ofBytes ?? 0) ? stated : null;
}

function kvCache(engine) {
  if (engine.kv_cache_used_ratio === null) return "-";
  const bytes = kvCacheBytes(engine, used(engine));
  return `${percent(engine.kv_cache_used_ratio, 1)}${bytes === null ? "" : ` of ${human(bytes)}`}`;
}

/** The engine that a process belongs to, if it belongs to one. */
export function engineOf(process) {
  const key = processKey(process);
  return state.frame.snapshot.engines.find((engine) => engine.processes.some((each) => processKey(each) === key));
}

/** The share of a process that contains the KV cache: without an agent all its memory is opaque. */
export const holder = (process) => (process.live_bytes === null ? "opaque" : "live");

/** The part of a process's memory that is KV cache, and its use. The size is that of the whole engine, so it is shown
only if one process on one device holds it. */
export function kvCacheOf(process, engine) {
  if (!engine || engine.sleeping || engine.kv_cache_used_ratio === null) return "";
  const alone = processesOf(engine).length === 1;
  const bytes = alone ? kvCacheBytes(engine, process[`${holder(process)}_bytes`]) : null;
  const size = bytes === null ? "" : `${human(bytes)}, `;
  return `of which KV cache ${size}${percent(engine.kv_cache_used_ratio, 1)} in use`;
}

function createEngine() {
  const row = make("tr");
  for (const column of COLUMNS) {
    const cell = make(column.id === "name" ? "th" : "td", make("bdi"));
    cell.className = classes(column);
    if (column.id === "name") cell.scope = "row";
    row.append(cell);
  }
  return make("tbody", row);
}

const classes = ({ id, number, wide }) => [`of-${id}`, number && "number", wide && "wide"].filter(Boolean).join(" ");

function updateEngine(body, engine) {
  const cells = body.firstChild.children;
  COLUMNS.forEach((column, place) => name(cells[place].firstChild, column.text(engine), 600));
  body.querySelector(".of-condition").classList.toggle("notable", !engine.up || engine.out_of_service_seconds !== null);
}

export function showEngines() {
  const { engines } = state.frame.snapshot;
  $("engines-section").hidden = !engines.length;
  sync($("engines"), engines, (engine) => engine.name, createEngine, updateEngine, 1);
}

sync(
  $("engine-columns"),
  COLUMNS,
  (column) => column.id,
  () => Object.assign(make("th"), { scope: "col" }),
  (cell, column) => {
    cell.className = classes(column);
    put(cell, column.title);
  },
);
