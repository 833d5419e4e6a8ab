// The newest frame and the events, as this window received them, and what follows from a frame.

import { human, sum } from "./format.js";
import { ORDINARY, UNDECIDED } from "./words.js";

const EVENTS_SHOWN = 200;
const MANY = 1000; // processes
const REST = 900; // milliseconds between two drawings
const LONG_REST = 1900; // the same with many processes

export const state = {
  frame: null,
  receivedAt: 0, // performance.now() of the newest frame
  failures: 0, // requests in succession without a frame
  cause: null, // of the failures: "unreachable", "connections" or the daemon's problem document
  problem: null, // the daemon's answer in place of a first frame
  closed: false, // the daemon requires a token for reading
  paused: false, // by the user: the frame stays
  devices: new Map(), // of the frame, by UUID
  lines: null, // of the frame's ledger, by UUID of the device; null until they are used
  sums: null, // bytes of each share by UUID of the device; null until they are used
  events: new Map(), // by id
};

/** Calls of the functions that draw; page.js adds its own. */
export const drawing = new EventTarget();
export const changed = () => drawing.dispatchEvent(new Event("change"));
let scheduled = false;
let drawnAt = -Infinity; // performance.now()
/** Draws all of the newest frame soon, in a task of its own: within a second, or two if it has many processes; at once if
the daemon does not answer. */
export function drawSoon() {
  if (scheduled) return;
  scheduled = true;
  const rest = state.failures ? 0 : state.frame?.processes.length > MANY ? LONG_REST : REST;
  setTimeout(() => requestAnimationFrame(draw), rest - (performance.now() - drawnAt));
}

function draw() {
  [scheduled, drawnAt] = [false, performance.now()];
  changed();
}

export function setFrame(frame) {
  state.frame = frame;
  state.receivedAt = performance.now();
  state.lines = state.sums = null;
  state.devices = new Map((frame?.snapshot.devices ?? []).map((device) => [device.uuid, device]));
}

export function addEvents(events) {
  for (const event of events.slice(-EVENTS_SHOWN)) state.events.set(event.id, event);
  const excess = [...state.events.keys()].sort((one, other) => one - other).slice(0, -EVENTS_SHOWN);
  for (const id of excess) state.events.delete(id);
}

/** Identity of a process: pids are reused. */
export const processKey = ({ pid, start_ticks }) => `${pid},${start_ticks}`;
const shapes = new Set(ORDINARY);
/** True if the verdict is of an ordinary shape of a memory curve. */
export const ordinary = (verdict) => shapes.has(verdict.kind);
const notes = new Set(UNDECIDED);
/** True if the verdict indicates no problem. */
export const isNote = (verdict) => notes.has(verdict.kind);
export const label = (device) => `GPU ${device.index}`;

/** Lines of the ledger of a device. */
export function linesOf(device) {
  if (!state.lines) {
    state.lines = new Map();
    for (const line of state.frame.ledger.lines) {
      if (!state.lines.has(line.device_uuid)) state.lines.set(line.device_uuid, []);
      state.lines.get(line.device_uuid).push(line);
    }
  }
  return state.lines.get(device.uuid) ?? [];
}

/** Devices that are not a part of another device. */
export const roots = () => state.frame.snapshot.devices.filter((device) => !state.devices.has(device.parent_uuid));

/** Bytes of each share on a device. */
export function sharesOf(device) {
  if (!state.sums) {
    state.sums = new Map(state.frame.snapshot.devices.map(({ uuid }) => [uuid, {}]));
    for (const { device_uuid: uuid, share, used_bytes: bytes } of state.frame.ledger.lines) {
      const sums = state.sums.get(uuid);
      if (sums) sums[share] = (sums[share] ?? 0) + bytes;
    }
  }
  return state.sums.get(device.uuid) ?? {};
}

/** Bytes of each share on several devices. */
export function sharesOfAll(devices) {
  const total = {};
  for (const device of devices)
    for (const [share, bytes] of Object.entries(sharesOf(device))) total[share] = (total[share] ?? 0) + bytes;
  return total;
}

/** Bytes that a flush of these devices would release; programs that allow no flush are counted as refused. */
export function reclaimableOf(devices) {
  if (state.frame.snapshot.reports.some((report) => report.flush_policy === "never")) return reclaimable(devices.flatMap(linesOf));
  const { cached } = sharesOfAll(devices);
  return { bytes: cached ?? 0, refused: 0, known: cached !== undefined };
}

/** Bytes that a flush of these ledger lines would release; programs that allow no flush are counted as refused. */
function reclaimable(lines) {
  const reports = state.frame.snapshot.reports;
  const refusing = new Set(state.frame.snapshot.reports.filter((report) => report.flush_policy === "never").map(processKey));
  const found = { bytes: 0, refused: 0, known: false };
  for (const line of lines) {
    if (line.share !== "cached") continue;
    found.known = true;
    found[refusing.size && refusing.has(processKey(line)) ? "refused" : "bytes"] += line.used_bytes;
  }
  return found;
}

/** What a flush would release, as a sentence. */
export function estimate({ bytes, refused, known }, subject = "A flush") {
  if (!known) return "";
  const more = refused ? ` Programs that don't allow a flush hold ${human(refused)} more in their caches.` : "";
  return `${subject} would release ${bytes ? `about ${human(bytes)}` : "nothing"}.${more}`;
}
