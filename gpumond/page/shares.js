// Sums of the bytes of each share.

import { sum } from "./format.js";
import { SHARES } from "./words.js";

const FIELDS = SHARES.map((share) => `${share}_bytes`);

/** Adds the known shares of a process, or of a device in the past, to `sums`. */
export function addShares(sums, process) {
  for (let place = 0; place < FIELDS.length; place++) {
    const bytes = process[FIELDS[place]];
    if (Number.isFinite(bytes)) sums[SHARES[place]] = (sums[SHARES[place]] ?? 0) + bytes;
  }
  return sums;
}

/** Bytes of each share by UUID of the device: those of its processes, and the ledger's lines of no process. */
export function sharesByDevice({ snapshot, ledger, processes }) {
  const found = new Map(snapshot.devices.map(({ uuid }) => [uuid, {}]));
  for (const process of processes) if (found.has(process.device_uuid)) addShares(found.get(process.device_uuid), process);
  for (const { device_uuid: uuid, share, used_bytes: bytes, pid } of ledger.lines)
    if (pid === null && found.has(uuid)) found.get(uuid)[share] = bytes;
  return found;
}

/** What programs are promised, want or need of a device's free memory. Its bytes are no share. */
export const CLAIMS = {
  granted: "Free memory that a program is granted and doesn't use yet.",
  "quota-reserve": "Free memory that a quota reserves, and that its programs neither use nor are granted.",
  waiting: "Free memory for a waiting program, which may need more.",
  suspended: "Free memory for resuming a program, which may need more.",
};

/** Claims as `{ kind, uuid, bytes, name }`. What a program waits for or is granted in order to resume is counted once. */
export function claimsOf({ queue, grants, snapshot, processes }) {
  const requested = new Set([...queue, ...grants].map(({ id, device_uuid: uuid }) => id + uuid));
  const of = (all, kind, field) => all.map((each) => ({ kind, uuid: each.device_uuid, bytes: each[field], name: "" }));
  const suspended = snapshot.suspended_programs
    .filter(({ state }) => state !== "resuming")
    .flatMap(({ grants: ids, memory }) => memory.filter(({ device_uuid: uuid }) => !ids.some((id) => requested.has(id + uuid))));
  const claims = [...of(grants, "granted", "unused_bytes"), ...reservesOf(processes, grants, snapshot.quotas), ...of(queue, "waiting", "need_bytes"), ...of(suspended, "suspended", "used_bytes")];
  return claims.filter(({ bytes }) => bytes > 0);
}

/** The unused part of each quota's reserve on each device, as the queue counts it; not of one that is unknown. */
function reservesOf(processes, grants, quotas) {
  const nameOf = new Map(quotas.map(({ pid, quota }) => [pid, quota.reserve_quota]));
  const found = new Map();
  for (const { device_uuid: uuid, quota, used_bytes: used } of processes.filter((each) => each.quota?.reserve_bytes)) {
    const { reserve_quota: name, reserve_bytes: bytes } = quota;
    const granted = sum(grants.filter((each) => each.device_uuid === uuid && nameOf.get(each.pid) === name).map((each) => each.need_bytes));
    const key = uuid + name;
    if (!found.has(key)) found.set(key, { kind: "quota-reserve", uuid, name, most: bytes - granted, bytes });
    found.get(key).bytes -= used ?? NaN;
  }
  return [...found.values()].map((each) => ({ ...each, bytes: Math.min(each.bytes, each.most) }));
}

/** The bytes by kind that claims take of the free memory of devices, in their order; none where it is unknown. */
export function claimedParts(claims, devices) {
  const parts = {};
  for (const { uuid, free_bytes: free } of devices) {
    let left = free ?? 0;
    for (const { kind, bytes } of claims.filter((each) => each.uuid === uuid)) {
      const part = Math.min(bytes, left);
      left -= part;
      parts[kind] = (parts[kind] ?? 0) + part;
    }
  }
  return parts;
}

/** The bytes of an interval of a chart that are no share: with the used bytes, the free and the reserved ones are the size.
*/
export function besides(column, size, reserved) {
  const over = sum(SHARES.map((share) => column[share] ?? 0)) - column.used;
  return { overcount: over < 0 ? null : over, ...(size !== null && { free: size - reserved - column.used, reserved, size }) };
}
