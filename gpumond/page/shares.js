// Sums of the bytes of each share.

import { sum } from "./format.js";
import { OF_PROCESSES, SHARES } from "./words.js";

const FIELDS = OF_PROCESSES.map((share) => [share, `${share}_bytes`]);

/** Adds the known shares of a process to `sums`. */
export function addShares(sums, process) {
  for (const [share, field] of FIELDS) if (process[field] !== null) sums[share] = (sums[share] ?? 0) + process[field];
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

/** The bytes of an interval of a chart that are no share: with the used bytes, the free and the reserved ones are the size.
*/
export function besides(column, size, reserved) {
  const over = sum(SHARES.map((share) => column[share] ?? 0)) - column.used;
  return { overcount: over < 0 ? null : over, ...(size !== null && { free: size - reserved - column.used, reserved, size }) };
}
