// The table of processes.

import * as address from "./address.js";
import { ORDINARY } from "./alerts.js";
import { toggle } from "./chart.js";
import { bar, showBar } from "./devices.js";
import { $, button, make, name, put, sync } from "./elements.js";
import { engineOf, holder, kvCacheOf } from "./engines.js";
import { flush } from "./flush.js";
import { clean, duration, human, many, sum } from "./format.js";
import { label, processKey, state } from "./store.js";
import { why } from "./why.js";
import { MISSED_LIMIT, OF_PROCESSES } from "./words.js";

const COLUMNS = [
  {
    id: "gpu",
    title: "GPU",
    of: (row) => row.device?.index ?? -1,
    text: (row) => String(row.device?.index ?? "?"),
    number: true,
  },
  { id: "pid", title: "PID", of: (row) => row.pid, text: (row) => String(row.pid), number: true, wide: true },
  { id: "program", title: "Program", of: (row) => row.program.toLowerCase() },
  { id: "user", title: "User", of: (row) => row.owner, wide: true },
  { id: "used", title: "Used", of: (row) => row.used_bytes ?? -1, text: (row) => human(row.used_bytes), number: true },
  ...OF_PROCESSES.map((share) => ({
    id: share,
    title: share[0].toUpperCase() + share.slice(1),
    of: (row) => row[`${share}_bytes`] ?? -1,
    text: (row) => human(row[`${share}_bytes`]),
    number: true,
    wide: share !== "cached",
  })),
  { id: "verdict", title: "Verdict", of: (row) => row.verdict, wide: true },
];
const FLUSH_POLICIES = { allow: "allowed", step: "at its next step", never: "not allowed" };

const [sortedBy, direction] = address.read("sort").split(",");
let order = COLUMNS.some(({ id }) => id === sortedBy) ? { id: sortedBy, up: direction === "up" } : { id: "used", up: false };
let filter = address.read("filter");

function rows() {
  const { frame, devices } = state;
  const verdicts = new Map();
  for (const verdict of frame.verdicts) {
    const key = [verdict.device_uuid, processKey(verdict)].join();
    if (!verdicts.has(key) || !ORDINARY.has(verdict.kind)) verdicts.set(key, verdict.kind);
  }
  const agents = new Map(frame.snapshot.reports.map((report) => [processKey(report), report]));
  const size = (process) => process.used_bytes ?? sum(OF_PROCESSES.map((share) => process[`${share}_bytes`] ?? 0));
  const largest = Math.max(1, ...frame.processes.map(size));
  return frame.processes.map((process) => ({
    ...process,
    largest,
    device: devices.get(process.device_uuid),
    program: process.workload || process.comm || "?",
    owner: process.user ?? (process.uid === null ? "" : String(process.uid)),
    verdict: verdicts.get([process.device_uuid, processKey(process)].join()) ?? "",
    agent: agents.get(processKey(process)),
  }));
}

function matches(row) {
  const { program, comm, owner, pid, verdict, container_name, pod_name, pod_namespace, unit, slurm_job } = row;
  const names = [program, comm, owner, pid, verdict, container_name, pod_name, pod_namespace, unit, slurm_job];
  const texts = [...names, row.device && label(row.device)].map((part) => String(part ?? "").toLowerCase());
  const terms = filter.toLowerCase().split(/\s+/);
  return terms.every((term) => texts.some((text) => text.includes(term)));
}

function showColumns() {
  sync(
    $("columns"),
    [...COLUMNS, { id: "act", title: "" }],
    (column) => column.id,
    (column) => {
      if (!column.title) return make("td");
      const cell = make(
        "th",
        button(column.title, () => sortBy(column), "button.plain"),
      );
      cell.scope = "col";
      return cell;
    },
    (cell, column) => {
      cell.className = [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ");
      const sorted = column.id === order.id;
      if (column.title) cell.setAttribute("aria-sort", sorted ? (order.up ? "ascending" : "descending") : "none");
    },
  );
}

function sortBy(column) {
  order = { id: column.id, up: order.id === column.id ? !order.up : !column.number };
  address.write("sort", `${order.id},${order.up ? "up" : "down"}`);
  showColumns();
  showProcesses(true);
}

function createProcess(row) {
  const body = make("tbody", make("tr"), make("tr.more", make("td")));
  const [head, more] = body.children;
  for (const column of COLUMNS) {
    const cell = make(column.id === "program" ? "th" : "td");
    cell.className = [`of-${column.id}`, column.number && "number", column.wide && "wide"].filter(Boolean).join(" ");
    head.append(cell);
  }
  const opener = button("", () => toggle(body, body.target), "button.plain");
  opener.append(make("bdi"));
  opener.setAttribute("aria-expanded", "false");
  opener.title = "Show history";
  const program = head.querySelector(".of-program");
  program.append(opener, make("span.state"), bar());
  program.scope = "row";
  head.append(
    make(
      "td.of-act",
      button("Flush…", () => flush({ pid: row.pid, start_ticks: row.start_ticks }, body.subject)),
    ),
  );
  more.hidden = true;
  more.firstChild.colSpan = COLUMNS.length + 1;
  const asks = button("Memory…", () => why(row.pid, body.subject));
  more.firstChild.append(make("div.history"), make("dl.facts"), make("p.why", asks));
  return body;
}

function updateProcess(body, row) {
  const [head, more] = body.children;
  body.target = { uuid: row.device_uuid, pid: row.pid, start_ticks: row.start_ticks };
  body.subject = `${row.program} (pid ${row.pid})`; // a program gets its name when its agent connects
  COLUMNS.forEach((column, place) => column.text && put(head.children[place], column.text(row)));
  name(head.querySelector(".of-program bdi"), row.program, 80);
  name(head.querySelector(".of-user"), row.owner, 40);
  put(head.querySelector(".of-verdict"), row.verdict, 40);
  head.querySelector(".of-verdict").classList.toggle("notable", row.verdict !== "" && !ORDINARY.has(row.verdict));
  const remarks = [
    row.state && row.state !== "alive" ? row.state : "",
    row.orphaned ? "orphaned" : "",
    row.kinds.includes("holder") ? "holds the device open" : "",
    row.unmapped_bytes ? `${human(row.unmapped_bytes)} asleep` : "",
  ];
  put(head.querySelector(".state"), remarks.filter(Boolean).join(", "), 80);
  const sums = Object.fromEntries(OF_PROCESSES.map((share) => [share, row[`${share}_bytes`] ?? 0]));
  showBar(head.querySelector(".bar"), sums, row.largest);
  const flushes = head.querySelector(".of-act button");
  flushes.hidden = !row.agent;
  flushes.disabled = !row.agent || row.agent.flush_policy === "never" || !row.cached_bytes;
  flushes.setAttribute("aria-label", `Flush ${clean(row.program, 80)}…`);
  if (more.hidden) return;
  const asks = body.querySelector(".why button");
  asks.parentNode.hidden = !row.agent?.pools.length;
  asks.setAttribute("aria-label", `Memory of ${clean(row.program, 80)}…`);
  sync(
    body.querySelector(".facts"),
    [...facts(row)],
    ([term]) => term,
    ([term]) => make("div", make("dt", term), make("dd", make("bdi"))),
    (entry, [, value]) => name(entry.lastChild.firstChild, value, 200),
  );
}

function* facts(row) {
  yield ["PID", String(row.pid)];
  const engine = engineOf(row);
  const kvCache = kvCacheOf(row, engine);
  for (const share of OF_PROCESSES) {
    const bytes = row[`${share}_bytes`];
    if (bytes !== null) yield [share, [human(bytes), share === holder(row) && kvCache].filter(Boolean).join(", ")];
  }
  if (row.unmapped_bytes !== null) yield ["unmapped", human(row.unmapped_bytes)];
  if (row.limit_bytes !== null) yield ["limit", human(row.limit_bytes)];
  if (row.quota) yield ["quota", quotaSentence(row.quota)];
  if (row.reserve_shortage_bytes) yield ["reserve", `${human(row.reserve_shortage_bytes)} not available`];
  const known = {
    command: row.comm,
    user: row.owner,
    verdict: row.verdict,
    state: row.state,
    kinds: row.kinds.join(", "),
    container: row.container_name ?? row.container,
    pod: row.pod_name && `${row.pod_namespace}/${row.pod_name}`,
    unit: row.unit,
    "Slurm job": row.slurm_job,
    engine: engine && `${engine.name} (${engine.kind})`,
  };
  for (const [term, value] of Object.entries(known)) if (value) yield [term, value];
  if (row.utilization_ratio !== null) yield ["busy", `${Math.round(100 * row.utilization_ratio)} %`];
  if (row.idle_seconds) yield ["idle for", duration(row.idle_seconds)];
  if (row.agent) yield* factsOfAgent(row.agent, row.device_uuid);
}

function quotaSentence(quota) {
  const kinds = { "soft limit": "soft", limit: "limit", reserve: "reserve" };
  return Object.entries(kinds)
    .filter(([, kind]) => quota[`${kind}_bytes`] !== null)
    .map(([name, kind]) => `${name} ${human(quota[`${kind}_bytes`])} (${quota[`${kind}_quota`]})`)
    .join(", ");
}

function* factsOfAgent(agent, uuid) {
  yield ["frameworks", agent.frameworks.join(", ") || "none yet"];
  yield ["flush", FLUSH_POLICIES[agent.flush_policy]];
  yield ["last report", `${agent.age_seconds.toFixed(1)} s before the frame`];
  for (const pool of agent.pools) {
    if (pool.device_uuid !== uuid) continue;
    const texts = [
      `${human(pool.held_bytes)} held`,
      pool.peak_live_bytes === null ? "" : `${human(pool.peak_live_bytes)} live at its peak`,
      pool.ooms ? many(pool.ooms, "out-of-memory error") : "",
    ];
    yield [`${pool.allocator}${pool.inside ? ` in ${pool.inside}` : ""}`, texts.filter(Boolean).join(", ")];
  }
}

/** `reorder`: also while the pointer or the focus is in the table, where rows otherwise keep their places. */
export function showProcesses(reorder = false) {
  const all = rows();
  const shown = all.filter(matches);
  const column = COLUMNS.find((each) => each.id === order.id);
  const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
  shown.sort((one, other) => (order.up ? 1 : -1) * compare(column.of(one), column.of(other)) || one.pid - other.pid);
  const table = $("processes");
  const still = !reorder && table.querySelector("tbody:hover, tbody:has(:focus-visible)") !== null;
  const key = (row) => [row.device_uuid, processKey(row)].join();
  sync(table, shown, key, createProcess, updateProcess, { fixed: 1, still });
  const { devices, reports } = state.frame.snapshot;
  const known = devices.some((device) => device.processes !== null && device.missed < MISSED_LIMIT);
  table.hidden = !all.length;
  const none = known ? "No process uses a device." : "The processes are not known.";
  put($("shown"), !all.length ? none : filter ? `${shown.length} of ${all.length}` : "");
  $("no-agents").hidden = reports.length > 0 || !known;
}

$("filter").value = filter;
$("filter").addEventListener("input", () => {
  filter = $("filter").value.trim();
  address.write("filter", filter);
  if (state.frame) showProcesses(true);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, dialog")) return;
  event.preventDefault();
  $("filter").focus();
});
showColumns();
