// What is known about one process on one device, in words.

import { engineOf, holder, kvCacheOf } from "./engines.js";
import { duration, sizeText, many, percent } from "./format.js";
import { hasAgent, hasPools } from "./state.js";
import { OF_PROCESSES } from "./words.js";

const LATE = 3; // seconds from which the age of a report is shown: most agents report each second
const FLUSH_POLICIES = { allow: "allowed", step: "at its next step", never: "not allowed" };

/** A term, its value at the time `now` of the frame, and whether a column of the row has the same value. `report`: that of
its agent, null until it is known. */
export function* facts(row, report, now) {
  yield ["PID", String(row.pid), true];
  if (row.started_at !== null) yield ["started", `${duration(Math.max(0, now - row.started_at))} ago`];
  const engine = engineOf(row);
  const kvCache = kvCacheOf(row, engine);
  for (const share of OF_PROCESSES) {
    const bytes = row[`${share}_bytes`];
    const parts = share === "overhead" && overheadSentence(row);
    if (bytes !== null) {
      const words = [sizeText(bytes), share === holder(row) && kvCache].filter(Boolean).join(", ");
      yield [share, parts ? `${words}: ${parts}` : words, !parts && words === sizeText(bytes)];
    }
  }
  if (row.unmapped_bytes !== null) yield ["unmapped", sizeText(row.unmapped_bytes)];
  if (row.limit_bytes !== null) yield ["limit", sizeText(row.limit_bytes)];
  if (row.quota) yield ["quota", quotaSentence(row)];
  if (row.reserve_shortage_bytes) yield ["reserve", `${sizeText(row.reserve_shortage_bytes)} taken by other programs`];
  const known = {
    command: row.command ?? row.comm,
    user: row.owner,
    verdict: row.verdict,
    state: row.suspension || row.state,
    kinds: row.kinds.join(", "),
    container: row.container_name ?? row.container,
    pod: row.pod_name && `${row.pod_namespace}/${row.pod_name}`,
    unit: row.unit,
    "Slurm job": row.slurm_job,
    engine: engine && `${engine.name} (${engine.kind})`,
  };
  for (const [term, value] of Object.entries(known)) if (value) yield [term, value, ["user", "verdict"].includes(term)];
  if (row.utilization_ratio !== null) yield ["busy", percent(row.utilization_ratio, 1)];
  if (row.idle_seconds) yield ["idle for", duration(row.idle_seconds)];
  if (hasAgent(row)) yield ["flush", FLUSH_POLICIES[row.flush_policy]];
  if (report) yield* factsOfAgent(report, row.device_uuid);
}

/** The parts of the overhead, as far as they are known. */
function overheadSentence(row) {
  const parts = (row.overhead_parts ?? []).filter(([, bytes]) => bytes);
  return parts.map(([name, bytes]) => `${name} ${sizeText(bytes)}`).join(", ");
}

/** Why the limit of a row's quota isn't in effect; empty if it is. */
export function unset(row) {
  if (row.quota.limit_bytes === null || row.limit_bytes !== null) return "";
  const reason = !hasAgent(row) ? "has no agent" : hasPools(row) ? "doesn't allow limits, or hasn't applied it" : "has no pool yet";
  return `limit not in effect: the program ${reason}`;
}

function quotaSentence(row) {
  const { quota } = row;
  const kinds = { "soft limit": "soft_limit", limit: "limit", reserve: "reserve", "cgroup limit": "cgroup_limit" };
  return Object.entries(kinds)
    .filter(([, kind]) => quota[`${kind}_bytes`] !== null)
    .map(([name, kind]) => `${name} ${sizeText(quota[`${kind}_bytes`])} (${quota[`${kind}_quota`]})`)
    .concat(unset(row) || [])
    .join(", ");
}

function* factsOfAgent(agent, uuid) {
  yield ["frameworks", agent.frameworks.join(", ") || "none yet"];
  if (agent.age_seconds >= LATE) yield ["last report", `${duration(agent.age_seconds)} ago`];
  for (const pool of agent.pools) {
    if (pool.device_uuid !== uuid) continue;
    const texts = [
      pool.held_known || pool.live_bytes !== null ? `${sizeText(pool.held_bytes)} held` : "held bytes unknown",
      pool.live_bytes === null ? "live bytes unknown" : "",
      pool.managed ? "managed memory, on the GPU or the host" : "",
      pool.peak_live_bytes === null ? "" : `${sizeText(pool.peak_live_bytes)} live at its peak`,
      pool.ooms ? many(pool.ooms, "out-of-memory error") : "",
    ];
    yield [`${pool.allocator}${pool.inside ? ` in ${pool.inside}` : ""}`, texts.filter(Boolean).join(", ")];
  }
}
