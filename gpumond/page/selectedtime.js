// The programs at a moment of the past.

import { showCursors } from "./chart.js";
import { clock } from "./format.js";
import { holdingsAt } from "./history.js";
import { processOf, state } from "./state.js";
import { showProcesses } from "./table.js";

const UNKNOWN = Object.fromEntries(["comm", "uid", "user", "container_name", "pod_name", "unit", "slurm_job", "started_at", "limit_bytes"].map((field) => [field, null]));
const OF_NOW = { kinds: [], orphaned: null, idle_seconds: null, utilization_ratio: null, unmapped_bytes: null, overhead_parts: null, quota: null, reserve_shortage_bytes: null, flush_policy: null, suspendable: false };

let held = null; // unix time

/** Lists the programs at this time, ended ones included, until it is null. */
export async function holdMoment(at) {
  if (at === held) return;
  held = at;
  let past = null;
  if (at !== null) {
    const holdings = await holdingsAt(at);
    if (holdings) past = { verdicts: [], alerts: [], snapshot: { ...state.frame.snapshot, taken_at: at, suspended_programs: [] }, holdings, processes: holdings.filter(({ pid }) => pid).map(pastRow) };
  }
  if (at !== held) return;
  state.past = past;
  showCursors();
  showProcesses(); // and nothing else: a chart that is drawn between two clicks gets no double click
}

/** What a program held, with what is known of it if it still runs. */
function pastRow({ name, ended_at: ended, unattributed_bytes: _, ...own }) {
  const now = processOf(own.device_uuid, own);
  return { ...UNKNOWN, workload: name, ...now, ...OF_NOW, ...own, state: ended === null ? "alive" : `ended ${clock(ended)}` };
}
