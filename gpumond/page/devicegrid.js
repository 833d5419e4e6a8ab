// Devices of a machine with many of them: what their rows and tiles contain.

import { cardsOf, levelOf } from "./cards.js";
import { sizeText, many, percent } from "./format.js";
import { sharesByDevice } from "./shares.js";
import { label } from "./state.js";
import { MISSED_LIMIT } from "./words.js";

const TILES_FROM = 33;

/** How this number of devices is shown: `one` in the picture alone, several as `rows` or as `tiles`. */
export const layoutOf = (count) => (count >= TILES_FROM ? "tiles" : count > 1 ? "rows" : "one");

/** What rows and tiles show of each device of a frame. Unknown values are null. */
export function devicesOf(frame, sums = sharesByDevice(frame)) {
  const programs = new Map();
  for (const { device_uuid: uuid } of frame.processes) programs.set(uuid, (programs.get(uuid) ?? 0) + 1);
  const problems = new Map(frame.snapshot.devices.map(({ uuid }) => [uuid, []])); // of each device, the most urgent first
  for (const card of cardsOf(frame)) if (["bad", "warn"].includes(levelOf(card))) problems.get(card.uuid)?.push(card);
  return frame.snapshot.devices.map((device) => {
    const [first, ...more] = problems.get(device.uuid);
    const state = stateOf(device);
    return {
      device,
      sums: sums.get(device.uuid),
      programs: device.processes === null ? null : (programs.get(device.uuid) ?? 0),
      problem: first ? first.kind + (more.length ? ` +${more.length}` : "") : "",
      level: state ? "warn" : first && levelOf(first),
      state,
    };
  });
}

/** The reason why the values of a device are old or unknown; empty if they are current. */
export function stateOf(device) {
  const readings = many(device.missed_readings, "reading");
  if (device.missed_readings >= MISSED_LIMIT) return `${readings} missed: values are hidden`;
  if (device.missed_readings) return `values are ${readings} old`;
  return device.up ? "" : "at fault";
}

const share = (name) => ({ title: name, text: ({ sums }) => sizeText(sums[name]), number: true, medium: true });
const sensor = (name, title, text) => ({
  title,
  text: ({ device }) => (device.sensors[name] === null ? "-" : text(device.sensors[name])),
  number: true,
  medium: true,
});

/** Columns of the rows, besides the device's name and its bar. */
export const DEVICE_COLUMNS = [
  { title: "used", text: ({ device }) => total(device), number: true },
  share("cached"),
  share("stranded"),
  sensor("gpu_utilization_ratio", "busy", (ratio) => percent(ratio, 1)),
  sensor("gpu_temperature_celsius", "°C", (degrees) => String(Math.round(degrees))),
  sensor("power_watts", "W", (watts) => String(Math.round(watts))),
  { title: "processes", text: ({ programs }) => String(programs ?? "-"), number: true, wide: true },
  { title: "15 min", spark: true, wide: true },
  { title: "problem", text: ({ state, problem }) => state || problem },
];

function total({ used_bytes: used, size_bytes: size }) {
  if (used === null) return "-";
  return size === null ? sizeText(used) : `${sizeText(used)} of ${sizeText(size)}`;
}

/** Used memory as a part of the size; `-` if it is unknown. */
export const usedShare = ({ used_bytes: used, size_bytes: size }) => (used === null || !size ? "-" : percent(used, size));

/** What a screen reader says of a tile. */
export const tileLabel = ({ device, state, problem }) =>
  [label(device), `${usedShare(device)} used`, state || problem].filter(Boolean).join(", ");
