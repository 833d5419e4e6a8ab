// Earlier processes of a workload: a program that was restarted continues their history.

import { state } from "./state.js";
import { ENDED } from "./words.js";

/** The ended processes of a row's workload on its device that were alive after `from`, the first one first, if the row
began later and no other process of the device has this workload. */
export function earlierLives({ workload, device_uuid: uuid, start_ticks: ticks, started_at: began }, from) {
  const own = (each) => each.workload === workload && each.device_uuid === uuid;
  if (!workload || !(began > from) || state.frame.processes.filter(own).length > 1) return [];
  const ends = [...state.events.values()].filter((event) => event.kind === ENDED && own(event));
  return ends.filter((event) => event.at > from && event.start_ticks < ticks);
}
