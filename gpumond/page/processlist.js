// Rows of the table of processes: what they contain, which are shown, their order and their groups.

import { cardsOf, levelOf, rankOf } from "./cards.js";
import { capital, clock, duration, sizeText, signed, sum } from "./format.js";
import { isProblem, label, ordinary, processKey } from "./state.js";
import { OF_PROCESSES, VERDICTS } from "./words.js";

const size = (id, bytes = `${id}_bytes`) => ({
  id,
  title: capital(id),
  bytes,
  of: (row) => row[bytes] ?? -1,
  text: (row) => (row.partial?.has(id) ? "≥ " : "") + sizeText(row[bytes]),
  number: true,
});

/** What a change is compared with, if that is not the value of the same process at the start of the range, or why it is
unknown. */
function tipOf({ change_bytes: bytes, change_since: since, change_pid: pid, change_new: fresh }) {
  if (fresh) return "all that it uses: it started after the range began";
  if (bytes === null) return since ? `its use before ${clock(since)} is unknown` : "";
  const first = since ? `since ${clock(since)}, the first known value` : "";
  return [first, pid ? `↻ from pid ${pid}, before the workload's restart` : ""].filter(Boolean).join("; ");
}

const knownChange = (row) => (row.partial?.has("change") ? null : row.change_bytes);

const VERDICT = { id: "verdict", title: "Verdict", of: (row) => row.verdict, text: (row) => row.verdict, wide: true };

/** Columns: the value that orders rows, and the text. `wide`: left out on narrow screens; `medium`: on phones and tablets. */
export const COLUMNS = [
  { id: "gpu", title: "GPU", of: (row) => row.device?.index ?? -1, text: (row) => String(row.device?.index ?? "?"), number: true },
  { id: "pid", title: "PID", of: (row) => row.pid, text: (row) => String(row.pid), number: true, medium: true },
  { id: "program", title: "Program", of: (row) => row.program.toLowerCase(), text: (row) => row.program },
  { id: "user", title: "User", of: (row) => row.owner, text: (row) => row.owner, wide: true },
  size("used"),
  {
    ...size("change"),
    of: (row) => knownChange(row) ?? -Infinity,
    text: (row) => (knownChange(row) === null ? "" : signed(row.change_bytes) + (row.change_pid ? " ↻" : "")),
    tip: tipOf,
  },
  { ...size("waste"), hint: "cached and stranded, not idle memory" },
  ...OF_PROCESSES.map((share) => ({ ...size(share), wide: share === "opaque", medium: true })),
  VERDICT,
];
const SIZES = COLUMNS.filter((column) => column.bytes);

/** What rows can be grouped by: the name of a row's group, empty if it has none. */
export const GROUPS = {
  device: (row) => (row.device ? label(row.device) : row.device_uuid),
  workload: (row) => row.workload,
  user: (row) => row.owner,
  container: (row) => row.container_name ?? row.container,
  pod: (row) => row.pod_name && `${row.pod_namespace}/${row.pod_name}`,
  "Slurm job": (row) => row.slurm_job,
};

/** The verdict on a program whose memory a suspension returns. */
export const IDLE = "idle-holder";
export const WAITING = "waiting to resume";
const stateOf = ({ state }) => (state === "waiting" ? WAITING : state);

/** The state of a suspended program, such as `suspended for 2 h; 60.0 GiB on the host; needs 61.2 GiB to resume (overhead included)`. */
export function suspensionSentence({ snapshot }, program) {
  const { since, resume_since: asked, host_bytes, memory, reason } = program;
  const ago = (at) => duration(Math.max(0, snapshot.taken_at - at));
  const now = stateOf(program);
  const parts = asked ? [`${now} for ${ago(asked)}`, `suspended for ${ago(since)}`] : [`${now} for ${ago(since)}`];
  if (host_bytes !== null) parts.push(`${sizeText(host_bytes)} on the host`);
  parts.push(`needs ${sizeText(sum(memory.map((each) => each.used_bytes)))} to resume (overhead included)`);
  return [...parts, reason].filter(Boolean).join("; ");
}

/** What `gpumond status` shows as a process's verdict. `remarks`: what else is true. */
function verdictOf(row, kind, { rule, rank } = {}) {
  const state = row.suspended || (row.state !== "alive" && row.state);
  const urgent = rank < (!kind || ordinary({ kind }) ? 2 : 1) ? rule : kind; // only a critical alert replaces a problem
  const odd = [row.orphaned && "parent exited", row.kinds.includes("holder") && "device open", row.unmapped_bytes && !row.suspended && `${sizeText(row.unmapped_bytes)} unmapped`];
  const verdict = [state, urgent, ...odd].find(Boolean) ?? "";
  const idle = kind === IDLE && `${sizeText(row.used_bytes)} idle`;
  const remarks = [rule, isProblem({ kind }) && kind, idle, ...odd].filter((each) => each && each !== verdict);
  return { verdict, remarks: [...new Set(remarks)] };
}

/** The processes of a frame on its devices, to which this adds what the table shows: in place, as there may be
thousands. */
export function rowsOf(frame) {
  const { snapshot, processes, verdicts: all, alerts } = frame;
  if (frame.listed === snapshot.seq) return processes;
  frame.listed = snapshot.seq;
  const verdicts = new Map();
  const cards = new Map(); // of each row and problem
  for (const card of cardsOf(frame)) if (card.process) cards.set(`${card.kind} ${card.uuid},${processKey(card.process)}`, card);
  const alerting = new Map(); // the most urgent alert of each row, except those that only inform or outlive their verdict
  for (const alert of alerts) {
    const labels = Object.fromEntries(alert.labels);
    const own = { rule: alert.rule, rank: rankOf(alert, labels) };
    const key = `${labels.uuid},${processKey(alert)}`;
    if (alert.rule in VERDICTS && !cards.get(`${alert.rule} ${key}`)?.verdict) continue;
    if (alert.pid && labels.severity !== "info" && !(alerting.get(key)?.rank <= own.rank)) alerting.set(key, own);
  }
  for (const verdict of all) {
    const key = `${verdict.device_uuid},${processKey(verdict)}`;
    if (ordinary(verdict) && alerting.has(key)) continue; // which the alert refutes
    if (!verdicts.has(key) || ordinary({ kind: verdicts.get(key) })) verdicts.set(key, verdict.kind);
  }
  const devices = new Map(snapshot.devices.map((device) => [device.uuid, device]));
  const suspended = new Map(snapshot.suspended_programs.map((each) => [processKey(each), each]));
  for (const row of processes) {
    row.own ??= processKey(row);
    row.key ??= `${row.device_uuid},${row.own}`;
    row.device = devices.get(row.device_uuid);
    row.program = row.workload || row.comm || "?";
    row.owner = row.user ?? (row.uid === null ? "" : String(row.uid));
    const program = suspended.get(row.own);
    row.suspension = program ? suspensionSentence(frame, program) : "";
    row.suspended = program ? stateOf(program) : "";
    const kind = verdicts.get(row.key) ?? "";
    const plain = kind !== IDLE && (row.state ?? "alive") === "alive" && !row.suspended && !row.orphaned && !row.unmapped_bytes && !row.kinds.includes("holder") && !alerting.has(row.key);
    Object.assign(row, plain ? { verdict: kind, remarks: [] } : verdictOf(row, kind, alerting.get(row.key)));
    const card = cards.get(`${row.verdict} ${row.key}`);
    row.level = card && levelOf(card, row);
    row.change_bytes = null;
    row.waste_bytes = row.cached_bytes === null ? null : row.cached_bytes + (row.stranded_bytes ?? 0);
  }
  return processes;
}

/** The workloads that run the agent, and neither use a device nor wait for one, in words. */
export function connectedText({ snapshot, queue, processes }) {
  const others = new Set(snapshot.reports.map(({ workload }) => workload).filter(Boolean).sort());
  for (const { workload } of [...queue, ...processes, ...snapshot.suspended_programs]) others.delete(workload);
  return others.size ? `Connected, without GPU memory: ${[...others].join(", ")}` : "";
}

/** A row in an address: by its workload, which outlives a restart, unless another row of the device has the same. */
export function addressOf(row, rows) {
  const twin = (other) => other.key !== row.key && other.device_uuid === row.device_uuid && other.workload === row.workload;
  return `${row.device?.index ?? ""}:${row.workload && !rows.some(twin) ? row.workload : row.pid}`;
}

/** True if an address names this row. */
export const isAt = (address, { device, workload, pid }) =>
  [workload, String(pid)].some((name) => name && address === `${device?.index ?? ""}:${name}`);

const OF_POOLS = ["waste", "live", "cached", "stranded", "overhead", "verdict"];
const MAY_BE_EMPTY = ["gpu", "user", "waste", ...OF_PROCESSES, "verdict"];

/** The columns in which some row has a value other than nothing or 0, of those that may be hidden. Those of pools appear
together. */
export function filled(rows, devices) {
  const fields = { user: "owner", verdict: "verdict" };
  const pools = rows.some((row) => row.live_bytes !== null);
  const has = (id, field) => (pools && OF_POOLS.includes(id)) || (id === "gpu" ? devices > 1 : rows.some((row) => row[field]));
  return MAY_BE_EMPTY.filter((id) => has(id, fields[id] ?? `${id}_bytes`));
}

/** What the table lists an item as: a `group` or a `process`. */
export const kindOf = (item) => (item.rows ? "group" : "process");

/** The bytes that the bar of a row consists of. */
export const barBytes = (row) => row.used_bytes ?? sum(OF_PROCESSES.map((share) => row[`${share}_bytes`] ?? 0));

/** What the filter searches, by the names that limit a word to one of them. */
const FIELDS = {
  __proto__: null,
  gpu: ({ device }) => device && label(device),
  pid: ({ pid }) => pid,
  program: ({ program, comm }) => `${program}\n${comm ?? ""}`,
  user: ({ owner }) => owner,
  container: ({ container_name: name }) => name,
  pod: ({ pod_name: name, pod_namespace: namespace }) => name && `${namespace}/${name}`,
  unit: ({ unit }) => unit,
  job: ({ slurm_job: job }) => job,
  verdict: ({ verdict, remarks }) => `${verdict}\n${remarks}`,
};
const EXACT = { __proto__: null, gpu: ({ device }) => device?.index, pid: FIELDS.pid };
const lower = (value) => String(value ?? "").toLowerCase();

/** What the help and the filter itself say about it. */
export const FILTER = `Rows that contain all words. user:root: in one field (${Object.keys(FIELDS).join(", ")}). -word: rows without it.`;

/** A test of rows from a word of the filter. */
function testOf(word) {
  const negated = word.length > 1 && word.startsWith("-");
  const term = negated ? word.slice(1) : word;
  const [, name, value] = /^(\w+):(.*)$/.exec(term) ?? [];
  const contains = (row) => {
    if (value && EXACT[name]) return lower(EXACT[name](row)) === value;
    if (FIELDS[name]) return lower(FIELDS[name](row)).includes(value);
    return Object.values(FIELDS).some((field) => lower(field(row)).includes(term));
  };
  return (row) => contains(row) !== negated;
}

/** The rows that match each word of `filter`, and are on the device with this index, if one is chosen. */
export function find(rows, filter, gpu = "") {
  const tests = filter.toLowerCase().split(/\s+/).filter(Boolean).map(testOf);
  const near = gpu === "" ? rows : rows.filter((row) => String(row.device?.index) === gpu);
  return tests.length ? near.filter((row) => tests.every((test) => test(row))) : near;
}

/** The rows in the order of a column; those with equal values by pid. */
function ordered(rows, { id, up }) {
  const column = COLUMNS.find((each) => each.id === id);
  const sign = up ? 1 : -1;
  for (const row of rows) row.rank = column.of(row); // by which rows are ordered
  return [...rows].sort((a, b) => (a.rank < b.rank ? -sign : a.rank > b.rank ? sign : a.pid - b.pid));
}

/** Groups of rows with sums, in the order of a column. A sum is of the known values; `partial` names those in which
others are unknown. A size is null if it is unknown for all rows. The verdict is a problem of one of them. */
export function grouped(rows, by, { id, up }) {
  const members = new Map();
  for (const row of rows) {
    const name = nameOf(by, row);
    if (!members.has(name)) members.set(name, []);
    members.get(name).push(row);
  }
  const groups = [...members].map(([name, own]) => groupOf(name, own, by));
  const column = [...SIZES, VERDICT].find((each) => each.id === id);
  const of = column ? column.of : (group) => (id === "gpu" && by === "device" ? (group.rows[0].device?.index ?? -1) : group.name);
  const sign = up ? 1 : -1;
  const compare = (one, other) => (one < other ? -sign : one > other ? sign : 0);
  return groups.sort((one, other) => compare(of(one), of(other)) || compare(one.name, other.name));
}

const nameOf = (by, row) => GROUPS[by](row) || "";

/** Key of the group that contains a row. */
export const groupKey = (by, row) => `group ${by} ${nameOf(by, row)}`;

function groupOf(name, rows, by) {
  const group = { key: groupKey(by, rows[0]), name, title: name || `no ${by}`, rows, partial: new Set() };
  for (const { id, bytes } of SIZES) {
    const known = rows.filter((row) => row[bytes] !== null);
    group[bytes] = known.length ? sum(known.map((row) => row[bytes])) : null;
    if (known.length && known.length < rows.length) group.partial.add(id);
  }
  const worst = rows.find(({ level }) => level === "bad") ?? rows.find(({ level }) => level);
  group.level = worst?.level;
  group.verdict = worst?.verdict ?? "";
  return group;
}

/** What the table lists: rows, or groups, each followed by its rows if it is unfolded. Those in `before`, keys, keep their
order: so do rows while the user points at one. */
export function listed(rows, by, order, unfolded, before = []) {
  const sorted = inOrderOf(before, ordered(rows, order));
  if (!by) return sorted;
  const groups = inOrderOf(before, grouped(sorted, by, order));
  return groups.flatMap((group) => (unfolded.has(group.key) ? [group, ...group.rows] : [group]));
}

/** The items in the order of `keys`, the new ones last. */
function inOrderOf(keys, items) {
  if (!keys.length) return items;
  const fresh = new Map(items.map((item) => [item.key, item]));
  const known = keys.filter((key) => fresh.has(key)).map((key) => fresh.get(key));
  const before = new Set(known);
  return [...known, ...items.filter((item) => !before.has(item))];
}
