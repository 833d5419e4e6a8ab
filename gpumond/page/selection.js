// The device that the user has chosen: the picture, the problems and the processes are its own.

import * as address from "./address.js";
import { changed, state } from "./state.js";

let index = address.read("gpu").split(",")[0]; // empty for all devices

/** The chosen device; nothing if all are shown. */
export const chosen = () => state.frame?.snapshot.devices.find((device) => String(device.index) === index);

/** Chooses a device by its index, or all. */
export function chooseIndex(wanted) {
  if (wanted === index) return;
  index = wanted;
  address.write("gpu", index);
  if (state.frame) changed();
}

export const choose = (device) => chooseIndex(device ? String(device.index) : "");
