// Declared serving engines: their state, models, requests, and the use of their KV cache.

import { $ } from "./elements.js";
import { duration, sizeText, percent, sum } from "./format.js";
import { createTable, showTable } from "./viewtables.js";
import { processKey, state } from "./state.js";
import { NOT_READ } from "./words.js";

const count = (value) => (value === null ? "-" : String(value));
const idle = (seconds) => (seconds === null ? "-" : duration(seconds));

const COLUMNS = [
  { title: "Engine", text: (engine) => engine.name, long: true },
  { title: "Kind", text: (engine) => engine.kind, wide: true },
  { title: "State", text: condition, update: (cell, { up, out_of_service_seconds: out }) => cell.classList.toggle("warn", !up || out !== null) },
  { title: "Models", text: models, wide: true },
  { title: "Used", text: (engine) => sizeText(used(engine)), number: true },
  { title: "KV cache in use", text: kvCache, number: true },
  { title: "Running", text: (engine) => count(engine.running), number: true, wide: true },
  { title: "Waiting", text: (engine) => count(engine.waiting), number: true, wide: true },
  { title: "Idle", text: (engine) => idle(engine.idle_seconds), number: true, wide: true },
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
    model.size_bytes === null ? model.name : `${model.name} (${sizeText(model.size_bytes)})`,
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
  return `${percent(engine.kv_cache_used_ratio, 1)}${bytes === null ? "" : ` of ${sizeText(bytes)}`}`;
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
  const size = bytes === null ? "" : `${sizeText(bytes)}, `;
  return `of which KV cache ${size}${percent(engine.kv_cache_used_ratio, 1)} in use`;
}

const table = createTable("Engines", COLUMNS);

export function showEngines() {
  const { engines } = state.frame.snapshot;
  $("engines-section").hidden = !engines.length;
  showTable(table, engines, (engine) => engine.name);
}

$("engines-section").append(table);
