// The newest frame and the events, as this window received them, and what follows from a frame.

import { sizeText, sum } from "./format.js";
import { claimsOf, sharesByDevice } from "./shares.js";
import { ORDINARY, NOTES } from "./words.js";

const EVENTS_SENT = 200; // in a complete frame, the newest
const EVENTS_KEPT = 1000; // by the daemon, too
const MANY = 1000; // processes
const REST = 900; // milliseconds between two drawings
const LONG_REST = 1900; // the same with many processes

export const state = {
  frame: null,
  past: null, // in place of the frame, what the table of processes lists: the programs at a moment that the user holds
  receivedAt: 0, // performance.now() of the newest frame, or of the request for one after a pause
  failures: 0, // requests in succession without a frame
  cause: null, // of the failures: unreachable, connections or the daemon's problem document
  problem: null, // the daemon's answer in place of a first frame
  closed: false, // the daemon requires a token for reading
  paused: false, // by the user: the frame stays
  devices: new Map(), // of the frame, by UUID
  sums: null, // bytes of each share by UUID of the device; null until they are used
  claims: null, // on its devices; null until they are used
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
  setTimeout(draw, rest - (performance.now() - drawnAt));
}

function draw() {
  [scheduled, drawnAt] = [false, performance.now()];
  changed();
}

export function setFrame(frame) {
  state.frame = frame;
  state.receivedAt = performance.now();
  state.sums = state.claims = null;
  state.devices = new Map((frame?.snapshot.devices ?? []).map((device) => [device.uuid, device]));
}

/** A caller for people, as commands print it: a user of the machine with what the request came with. */
export function callerText(name) {
  const [, token, uid] = /^(?:(token[^/@]*)[^@]*@)?uid:(\d+)(?:\/[^@]*)?$/.exec(name) ?? [];
  const user = uid === "0" ? "root" : state.frame.processes.find((each) => String(each.uid) === uid)?.user;
  const means = [token, name.includes("/") && "browser"].filter(Boolean).join(", ");
  return user ? user + (means && ` (${means})`) : name;
}

/** Keeps events with the time at which they happened, if that is known, in place of the later one of their publication. */
export function addEvents(events) {
  for (const event of events) state.events.set(event.id, { ...event, at: Object.fromEntries(event.details).occurred_at ?? event.at });
  const excess = [...state.events.keys()].sort((one, other) => one - other).slice(0, -EVENTS_KEPT);
  for (const id of excess) state.events.delete(id);
}

/** The time from which all events are known. */
export const eventsSince = () =>
  state.events.size < EVENTS_SENT ? -Infinity : Math.min(...[...state.events.values()].map(({ at }) => at));

/** Identity of a process: pids are reused. */
export const processKey = ({ pid, start_ticks }) => `${pid},${start_ticks}`;
/** The row of a process on a device. */
export function processOf(uuid, process) {
  const key = processKey(process);
  return state.frame.processes.find((each) => each.device_uuid === uuid && processKey(each) === key);
}

const shapes = new Set(ORDINARY);
/** True if the verdict is of an ordinary shape of a memory curve. */
export const ordinary = (verdict) => shapes.has(verdict.kind);
const notes = new Set(NOTES);
/** True if the verdict needs a remedy; of a row without a verdict, its kind is empty. */
export const isProblem = (verdict) => verdict.kind !== "" && !ordinary(verdict) && !notes.has(verdict.kind);
export const label = (device) => `GPU ${device.index}`;

/** Devices that are not a part of another device. */
export const roots = () => state.frame.snapshot.devices.filter((device) => !state.devices.has(device.parent_uuid));

/** Bytes of each share on all devices of the frame, by UUID. */
export const sharesOfFrame = () => (state.sums ??= sharesByDevice(state.frame));

/** What programs claim of the memory of the frame's devices. */
export const claimsOfFrame = () => (state.claims ??= claimsOf(state.frame));

/** Bytes of each share on several devices. */
export function sharesOfAll(devices) {
  const total = {};
  for (const device of devices)
    for (const [share, bytes] of Object.entries(sharesOfFrame().get(device.uuid) ?? {})) total[share] = (total[share] ?? 0) + bytes;
  return total;
}

export const hasAgent = (row) => row.flush_policy !== null;
export const allowsFlush = (row) => hasAgent(row) && row.flush_policy !== "never";
export const hasPools = (row) => row.live_bytes !== null;

/** Bytes that a flush of these devices would release; programs that allow no flush are counted as refused. */
export function reclaimableOf(devices) {
  const { cached } = sharesOfAll(devices);
  const own = new Set(devices.map(({ uuid }) => uuid));
  const refused = sum(
    state.frame.processes
      .filter((each) => each.flush_policy === "never" && own.has(each.device_uuid))
      .map((each) => each.cached_bytes ?? 0),
  );
  return { bytes: (cached ?? 0) - refused, refused, known: cached !== undefined };
}

/** What a flush would release, as the parts of a sentence: the amount is the second. */
export function estimate({ bytes, refused, known }) {
  if (!known) return ["", "", ""];
  const more = refused ? `Programs that don't allow a flush have ${sizeText(refused)} more in their caches.` : "";
  return [`A flush now releases${bytes ? " about" : ""}`, bytes ? sizeText(bytes) : "nothing", more];
}
