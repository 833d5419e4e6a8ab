// One frame, shown. Every number is of one frame, save those of charts, events and receipts, which are of their own time.
// Text from programs goes into the page by textContent alone.

import { EVENTS, MISSED_LIMIT, OF_PROCESSES, ORDINARY as SHAPES, SHARES } from "./words.js";

const ORDINARY = new Set(SHAPES);
const PAUSE = 1000;
const CHART_PAUSE = 5000;
const EVENTS_SHOWN = 200;

// ---- words and numbers

/** Without what changes how other text reads: control characters, escapes, marks of direction. Cut to `most`. */
export function clean(text, most = 300) {
  const safe = String(text ?? "")
    .slice(0, most + 1)
    .replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, "\uFFFD");
  return safe.length > most ? safe.slice(0, most - 1) + "…" : safe;
}

/** One decimal, ties to even, as the command line writes it. */
function tenths(value) {
  const tie = Number.isInteger(value * 4) && !Number.isInteger(value * 2);
  const below = Math.floor(value * 10);
  return tie ? ((below + Math.abs(below % 2)) / 10).toFixed(1) : value.toFixed(1);
}

/** Bytes for people: `31.2 GiB`; `-` for unknown. */
export function human(bytes) {
  if (bytes === null || bytes === undefined) return "-";
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${Math.round(size)} B` : `${tenths(size)} ${unit}`;
    size /= 1024;
  }
  return `${tenths(size)} GiB`;
}

export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

const percent = (part, whole) => `${Math.round((100 * part) / whole)} %`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;

// ---- the document

const $ = (id) => document.getElementById(id);

/** An element; `name.class`. Children are elements or text. */
function make(kind, ...children) {
  const [name, ...classes] = kind.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  node.append(...children);
  return node;
}

/** What is the same is left alone, so that a screen reader does not say it again. */
function put(node, text, most = 1000) {
  const safe = clean(text, most);
  if (node.textContent !== safe) node.textContent = safe;
}

/** A name from a program: isolated, so that its direction cannot reorder what stands beside it. */
function named(text, most = 300) {
  const node = make("bdi");
  name(node, text, most);
  return node;
}

function name(node, text, most = 300) {
  put(node, text, most);
  node.title = clean(text, 1000);
}

function button(text, act, kind = "button") {
  const node = make(kind, text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

/** Makes the children of `parent` those of `items`, each kept by its key from call to call. */
function sync(parent, items, key, create, update, { fixed = 0, still = false } = {}) {
  const before = parent.kept ?? new Map();
  const focus = document.activeElement;
  const fresh = new Map(items.map((item) => [key(item), item]));
  const keys = still
    ? [...new Set([...[...before.keys()].filter((known) => fresh.has(known)), ...fresh.keys()])]
    : [...fresh.keys()];
  for (const [known, node] of before) if (!fresh.has(known)) node.remove();
  parent.kept = new Map();
  keys.forEach((known, place) => {
    const node = before.get(known) ?? create(fresh.get(known));
    if (parent.children[fixed + place] !== node) parent.insertBefore(node, parent.children[fixed + place] ?? null);
    update(node, fresh.get(known));
    parent.kept.set(known, node);
  });
  if (focus?.isConnected && document.activeElement !== focus) focus.focus({ preventScroll: true });
}

// ---- what is known

let frame = null;
let etag = null;
let failures = 0;
let problem = null; // what the daemon answers instead of a frame
let closed = false; // reading wants the token too, as it may where others can reach the daemon
let freshAt = 0; // performance.now() of the newest frame
let byDevice = new Map();

function read(path, headers = {}) {
  const own = closed && token ? { Authorization: `Bearer ${token}` } : {};
  return fetch(path, { headers: { ...headers, ...own }, cache: "no-store", signal: AbortSignal.timeout(5000) });
}

async function look() {
  try {
    const answer = await read("api/v1/frame", etag ? { "If-None-Match": etag } : {});
    if (answer.status === 200) {
      frame = await answer.json();
      etag = answer.headers.get("ETag");
      freshAt = performance.now();
      problem = null;
    } else if (answer.status !== 304) {
      [frame, etag, problem] = [null, null, await answer.json()];
      if (answer.status === 401 && closed) keep(""); // it was shown, and is wrong
      closed ||= answer.status === 401;
    }
    failures = 0;
  } catch {
    failures += 1;
  }
  show();
}

let looking = 0;
async function keepLooking() {
  clearTimeout(looking);
  if (document.hidden) return;
  await look();
  clearTimeout(looking);
  looking = setTimeout(keepLooking, PAUSE);
}

// ---- notices: what is wrong with the picture itself

function* notices() {
  if (failures) {
    const since = frame ? ` What it said last is of ${clock(frame.snapshot.taken_at)}.` : "";
    yield [
      "bad",
      "The daemon does not answer",
      `${failures > MISSED_LIMIT ? "Numbers are withdrawn." : "They may be old."}${since} It is asked again every second; gpumond serve starts one.`,
    ];
    return;
  }
  if (!frame) {
    const titles = { 401: "Sign in to look", 403: "This is not for you to see", 503: "Starting" };
    yield [
      "note",
      titles[problem?.status] ?? (problem ? "The daemon has no answer" : "Asking the daemon"),
      problem?.detail ?? "",
    ];
    return;
  }
  const { source, seq, elapsed_seconds, devices } = frame.snapshot;
  const interval = elapsed_seconds / Math.max(1, seq);
  const age = (performance.now() - freshAt) / 1000;
  if (age > Math.max(5, 3 * interval))
    yield ["bad", `Nothing new for ${duration(age)}`, "The daemon answers, but takes no new frame."];
  const ofSource = (fault) => fault.source === source.name && fault.kind === source.reason;
  if (!source.up) {
    const title = source.reason === "released" ? "The driver is let go of" : `No device can be read: ${source.reason}`;
    yield ["bad", title, advised(source.detail, frame.faults.find(ofSource)?.mend)];
  } else if (!source.responsive) {
    yield [
      "bad",
      "The driver does not answer",
      "Numbers are of its last answer, and are withdrawn with the third that is missed.",
    ];
  } else if (!devices.length) {
    yield [
      "warn",
      "No device is here",
      "The driver answers and lists none; programs and events are shown nevertheless.",
    ];
  }
  for (const fault of frame.faults) {
    if (!source.up && ofSource(fault)) continue;
    const device = byDevice.get(fault.device_uuid);
    yield ["warn", `${device ? label(device) : fault.source}: ${fault.kind}`, advised(fault.detail, fault.mend)];
  }
  for (const condition of frame.conditions) {
    if (!condition.device_uuid) yield ["note", `This machine: ${condition.kind.replaceAll("_", " ")}`, condition.mend];
  }
}

/** What is wrong, and what to do about it, which some say themselves. */
function advised(detail, mend) {
  return !mend || detail.includes(mend) ? detail : [detail, mend].filter(Boolean).join(": ");
}

function showNotices() {
  const all = [...notices()];
  const most = 8;
  const shown = all.slice(0, most);
  if (all.length > most) shown.push(["note", `${all.length - most} more`, "see gpumond status"]);
  sync(
    $("notices"),
    shown,
    ([, title], place) => title,
    () => make("p", make("strong"), " ", make("bdi")),
    (node, [level, title, detail]) => {
      node.className = level;
      put(node.firstChild, title, 300);
      name(node.lastChild, detail, 600);
    },
  );
}

// ---- devices

const label = (device) => `GPU ${device.index}`;

/** Bytes of each share, from lines of the ledger. */
function shares(lines) {
  const sums = {};
  for (const line of lines) sums[line.share] = (sums[line.share] ?? 0) + line.used_bytes;
  return sums;
}

function bar() {
  const node = make("div.bar", ...SHARES.map((share) => make(`span.${share}`)), make("span.reserved"));
  node.setAttribute("role", "img");
  return node;
}

function showBar(node, sums, size, reserved = 0) {
  [...SHARES, "reserved"].forEach((share, place) => {
    const bytes = share === "reserved" ? reserved : sums[share];
    const part = node.children[place];
    part.hidden = !bytes || !size;
    part.style.width = part.hidden ? "0" : `${(100 * bytes) / size}%`;
    part.title = part.hidden ? "" : `${share} ${human(bytes)}`;
  });
  const said = SHARES.filter((share) => sums[share]).map((share) => `${share} ${human(sums[share])}`);
  const text = said.join(", ") || "nothing used";
  if (node.getAttribute("aria-label") !== text) node.setAttribute("aria-label", text);
}

/** What a flush of these programs would return: what is cached, without those that allow none. */
function returnable(lines) {
  const refusing = new Set(
    frame.snapshot.reports.filter((report) => report.flush_policy === "never").map((report) => report.pid),
  );
  const cached = lines.filter((line) => line.share === "cached");
  return {
    bytes: sum(cached.filter((line) => !refusing.has(line.pid)).map((line) => line.used_bytes)),
    refused: sum(cached.filter((line) => refusing.has(line.pid)).map((line) => line.used_bytes)),
    known: cached.length > 0,
  };
}

function promise(lines, whose = "A flush") {
  const { bytes, refused, known } = returnable(lines);
  if (!known) return "";
  const more = refused ? `; ${human(refused)} more belong to programs that allow none` : "";
  return `${bytes ? `${whose} would return about ${human(bytes)}` : `${whose} would return nothing`}${more}.`;
}

const linesOf = (device) => frame.ledger.lines.filter((line) => line.device_uuid === device.uuid);
const roots = () => frame.snapshot.devices.filter((device) => !byDevice.has(device.parent_uuid));

function createDevice(device) {
  const opener = button("", () => toggle(node, node.target), "button.plain");
  opener.append(make("span"), " ", make("bdi"));
  opener.setAttribute("aria-expanded", "false");
  opener.title = "Show its history";
  const history = make("div.history");
  history.hidden = true;
  const node = make(
    "article.device",
    make("div.head", make("h3", opener), make("span.total"), make("span.state")),
    bar(),
    make("div.head", make("dl.legend"), make("span.sensors")),
    make(
      "div.foot",
      make("span.promise"),
      button("Flush…", () => flush({ device: device.uuid }, label(device))),
    ),
    make("ul.conditions"),
    history,
  );
  return node;
}

function updateDevice(node, device) {
  const lines = linesOf(device);
  const sums = shares(lines);
  const known = device.used_bytes !== null;
  node.target = { uuid: device.uuid, pid: null };
  const find = (query) => node.querySelector(query);
  const opener = find("h3 button");
  put(opener.firstElementChild, label(device));
  name(opener.lastChild, device.name, 80);
  const ratio = known && device.size_bytes ? ` · ${percent(device.used_bytes, device.size_bytes)}` : "";
  put(find(".total"), known ? `${human(device.used_bytes)} of ${human(device.size_bytes)} used${ratio}` : "");
  const readings = many(device.missed, "reading");
  put(
    find(".state"),
    device.missed >= MISSED_LIMIT
      ? `no answer for ${readings}: values are withdrawn`
      : device.missed
        ? `of ${readings} ago`
        : device.up
          ? ""
          : "at fault",
  );
  node.classList.toggle("lost", !known);
  showBar(find(".bar"), sums, device.size_bytes, device.reserved_bytes ?? 0);
  find(".bar").classList.toggle("over", sum(Object.values(sums)) > (device.size_bytes ?? Infinity));
  const overcount = frame.ledger.overcounts.find((each) => each.device_uuid === device.uuid)?.overcount_bytes;
  const entries = SHARES.filter((share) => sums[share]).map((share) => [share, sums[share]]);
  if (known) entries.push(["free", device.free_bytes]);
  if (device.reserved_bytes) entries.push(["reserved", device.reserved_bytes]);
  if (overcount) entries.push(["overcount", overcount]);
  sync(
    find(".legend"),
    entries,
    ([share]) => share,
    ([share]) => make("div", make("dt", make(`i.${share}`), share), make("dd")),
    (entry, [, bytes]) => put(entry.lastChild, human(bytes)),
  );
  put(find(".promise"), promise(lines));
  const { gpu_utilization_ratio: busy, gpu_temperature_celsius: heat, power_watts: power } = device.sensors;
  put(
    find(".sensors"),
    [
      busy === null ? "" : `${Math.round(100 * busy)} % busy`,
      heat === null ? "" : `${Math.round(heat)} °C`,
      power === null ? "" : `${Math.round(power)} W`,
    ]
      .filter(Boolean)
      .join(" · "),
  );
  const flushes = find(".foot button");
  find(".foot").hidden = !find(".promise").textContent;
  flushes.hidden = frame.snapshot.devices.length < 2;
  flushes.disabled = !returnable(lines).bytes;
  flushes.setAttribute("aria-label", `Flush ${label(device)}…`);
  const conditions = frame.conditions.filter((condition) => condition.device_uuid === device.uuid);
  sync(
    find(".conditions"),
    conditions,
    (condition) => condition.kind,
    () => make("li"),
    (entry, { kind, mend }) => put(entry, `${kind.replaceAll("_", " ")}: ${mend}`),
  );
}

function showDevices() {
  sync($("devices"), frame.snapshot.devices, (device) => device.uuid, createDevice, updateDevice);
  const all = roots().filter((device) => device.used_bytes !== null);
  const uuids = new Set(all.map((device) => device.uuid));
  const lines = frame.ledger.lines.filter((line) => uuids.has(line.device_uuid));
  const used =
    all.length > 1
      ? `${human(sum(all.map((device) => device.used_bytes)))} of ${human(sum(all.map((device) => device.size_bytes ?? 0)))} used on ${all.length} devices. `
      : "";
  put($("summary"), all.length > 1 ? used + promise(lines, "A flush of all") : "");
  $("flush-all").hidden = !frame.snapshot.reports.length;
  $("flush-all").disabled = !returnable(lines).bytes;
}

// ---- alerts and verdicts

const SEVERITY = { critical: 0, page: 0, warning: 1, info: 2 };
const LEVELS = { critical: "bad", page: "bad", info: "note" };

function showAlerts() {
  const entries = frame.alerts.map((alert) => ({
    ...alert,
    labels: Object.fromEntries(alert.labels),
    notes: Object.fromEntries(alert.annotations),
  }));
  const rank = (alert) => 10 * (alert.phase !== "firing") + (SEVERITY[alert.labels.severity] ?? 1);
  entries.sort((one, other) => rank(one) - rank(other) || one.active_at - other.active_at);
  const now = frame.snapshot.taken_at;
  sync(
    $("alerts"),
    entries,
    (alert) => JSON.stringify([alert.rule, Object.entries(alert.labels)]),
    () => make("li", make("b"), make("time"), make("bdi")),
    (node, alert) => {
      const firing = alert.phase === "firing";
      node.className = firing ? (LEVELS[alert.labels.severity] ?? "warn") : "quiet";
      name(node.children[0], alert.rule, 80);
      name(node.children[2], alert.notes.summary ?? "", 400);
      put(
        node.children[1],
        `${firing ? "fires" : "pending"} for ${duration(now - (alert.fired_at ?? alert.active_at))}`,
      );
    },
  );
  $("no-alerts").hidden = entries.length > 0;
  const firing = entries.filter((alert) => alert.phase === "firing").length;
  document.title = `${firing ? `(${firing}) ` : ""}gpumond ${location.host}`;
}

function showVerdicts() {
  const notable = frame.verdicts.filter((verdict) => !ORDINARY.has(verdict.kind));
  notable.sort(
    (one, other) =>
      (one.time_to_oom_seconds ?? Infinity) - (other.time_to_oom_seconds ?? Infinity) || one.since - other.since,
  );
  sync(
    $("verdicts"),
    notable,
    (verdict) => [verdict.device_uuid, verdict.pid, verdict.kind].join(),
    () => make("li", make("b"), make("time"), make("bdi")),
    (node, verdict) => {
      node.className = verdict.kind === "release" ? "note" : "warn";
      put(node.children[0], verdict.kind, 80);
      name(node.children[2], verdict.summary, 400);
      put(node.children[1], `since ${clock(verdict.since)}`);
    },
  );
  const ordinary = frame.verdicts.length - notable.length;
  put(
    $("no-verdicts"),
    notable.length
      ? ""
      : ordinary
        ? `All is ordinary: ${many(ordinary, "curve")} judged, none asks for attention.`
        : "None yet: a curve is judged once it is long enough.",
  );
}

// ---- processes

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
let order = { id: "used", up: false };
let filter = "";
const keyOf = (row) => [row.device_uuid, row.pid, row.start_ticks].join();

function rows() {
  const verdicts = new Map();
  for (const verdict of frame.verdicts) {
    const key = [verdict.device_uuid, verdict.pid].join();
    if (!verdicts.has(key) || !ORDINARY.has(verdict.kind)) verdicts.set(key, verdict.kind);
  }
  const agents = new Map(frame.snapshot.reports.map((report) => [report.pid, report]));
  const size = (process) => process.used_bytes ?? sum(OF_PROCESSES.map((share) => process[`${share}_bytes`] ?? 0));
  const largest = Math.max(1, ...frame.processes.map(size));
  return frame.processes.map((process) => ({
    ...process,
    largest,
    device: byDevice.get(process.device_uuid),
    program: process.workload || process.comm || "?",
    owner: process.user ?? (process.uid === null ? "" : String(process.uid)),
    verdict: verdicts.get([process.device_uuid, process.pid].join()) ?? "",
    agent: agents.get(process.pid),
  }));
}

function matches(row) {
  const text = [
    row.program,
    row.comm,
    row.owner,
    row.pid,
    row.verdict,
    row.container_name,
    row.pod_name,
    row.pod_namespace,
    row.unit,
    row.slurm_job,
    row.device && label(row.device),
  ];
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every((word) =>
      text.some((part) =>
        String(part ?? "")
          .toLowerCase()
          .includes(word),
      ),
    );
}

function showColumns() {
  sync(
    $("columns"),
    [...COLUMNS, { id: "act", title: "" }],
    (column) => column.id,
    (column) => {
      const cell = make(
        column.title ? "th" : "td",
        ...(column.title ? [button(column.title, () => sortBy(column), "button.plain")] : []),
      );
      if (column.title) cell.scope = "col";
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
  opener.title = "Show its history";
  const state = make("span.state");
  head.querySelector(".of-program").append(opener, state, bar());
  head.querySelector(".of-program").scope = "row";
  head.append(
    make(
      "td.of-act",
      button("Flush…", () => flush({ pid: row.pid }, `${row.program} (pid ${row.pid})`)),
    ),
  );
  more.hidden = true;
  more.firstChild.colSpan = COLUMNS.length + 1;
  more.firstChild.append(make("div.history"), make("dl.facts"));
  return body;
}

function updateProcess(body, row) {
  const [head] = body.children;
  body.target = { uuid: row.device_uuid, pid: row.pid };
  COLUMNS.forEach((column, place) => column.text && put(head.children[place], column.text(row)));
  name(head.querySelector(".of-program bdi"), row.program, 80);
  name(head.querySelector(".of-user"), row.owner, 40);
  put(head.querySelector(".of-verdict"), row.verdict, 40);
  head.querySelector(".of-verdict").classList.toggle("notable", row.verdict !== "" && !ORDINARY.has(row.verdict));
  const odd = [
    row.state && row.state !== "alive" ? row.state : "",
    row.orphaned ? "orphaned" : "",
    row.kinds.includes("holder") ? "holds the device open" : "",
  ];
  put(head.querySelector(".state"), odd.filter(Boolean).join(", "), 80);
  const sums = Object.fromEntries(OF_PROCESSES.map((share) => [share, row[`${share}_bytes`] ?? 0]));
  showBar(head.querySelector(".bar"), sums, row.largest);
  const flushes = head.querySelector(".of-act button");
  flushes.hidden = !row.agent;
  flushes.disabled = !row.agent || row.agent.flush_policy === "never" || !row.cached_bytes;
  flushes.setAttribute("aria-label", `Flush ${clean(row.program, 80)}…`);
  const facts = body.querySelector(".facts");
  if (body.children[1].hidden) return;
  sync(
    facts,
    [...describe(row)],
    ([term]) => term,
    ([term]) => make("div", make("dt", term), make("dd", make("bdi"))),
    (entry, [, value]) => name(entry.lastChild.firstChild, value, 200),
  );
}

function* describe(row) {
  yield ["PID", String(row.pid)];
  for (const share of OF_PROCESSES) if (row[`${share}_bytes`] !== null) yield [share, human(row[`${share}_bytes`])];
  const facts = {
    command: row.comm,
    user: row.owner,
    verdict: row.verdict,
    state: row.state,
    kinds: row.kinds.join(", "),
    container: row.container_name ?? row.container,
    pod: row.pod_name && `${row.pod_namespace}/${row.pod_name}`,
    unit: row.unit,
    "Slurm job": row.slurm_job,
  };
  for (const [term, value] of Object.entries(facts)) if (value) yield [term, value];
  if (row.utilization_ratio !== null) yield ["busy", `${Math.round(100 * row.utilization_ratio)} %`];
  if (row.idle_seconds) yield ["idle for", duration(row.idle_seconds)];
  if (!row.agent) return;
  yield ["frameworks", row.agent.frameworks.join(", ") || "none yet"];
  yield ["flush", { allow: "allowed", step: "at its next step", never: "not allowed" }[row.agent.flush_policy]];
  yield ["reported", `${row.agent.age_seconds.toFixed(1)} s before the frame`];
  for (const pool of row.agent.pools) {
    if (pool.device_uuid === row.device_uuid)
      yield [
        `${pool.allocator}${pool.inside ? ` in ${pool.inside}` : ""}`,
        [
          `${human(pool.held_bytes)} held`,
          pool.peak_live_bytes === null ? "" : `${human(pool.peak_live_bytes)} live at its peak`,
          pool.ooms ? `${many(pool.ooms, "time")} out of memory` : "",
        ]
          .filter(Boolean)
          .join(", "),
      ];
  }
}

function showProcesses(anew = false) {
  const all = rows();
  const seen = all.filter(matches);
  const column = COLUMNS.find((each) => each.id === order.id);
  const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
  seen.sort((one, other) => (order.up ? 1 : -1) * compare(column.of(one), column.of(other)) || one.pid - other.pid);
  const table = $("processes");
  const still = !anew && table.querySelector("tbody:hover, tbody:has(:focus-visible)") !== null; // rows do not move under a hand
  sync(table, seen, keyOf, createProcess, updateProcess, { fixed: 1, still });
  const knowing = frame.snapshot.devices.some((device) => device.processes !== null && device.missed < MISSED_LIMIT);
  table.hidden = !all.length;
  put(
    $("shown"),
    !all.length ? (knowing ? "None uses a device." : "Not known.") : filter ? `${seen.length} of ${all.length}` : "",
  );
  $("no-agents").hidden = frame.snapshot.reports.length > 0 || !knowing;
}

// ---- history

const charts = new Map(); // where it is drawn → what of
const RANGES = [
  ["15 min", 900, 1],
  ["1 h", 3600, 15],
  ["24 h", 86400, 900],
]; // seconds, and how fine

function toggle(node, target) {
  const place = node.querySelector(".history");
  const shut = node.querySelector(".more") ?? place;
  shut.hidden = !shut.hidden;
  const opener = node.querySelector("[aria-expanded]");
  opener.setAttribute("aria-expanded", String(!shut.hidden));
  if (shut.hidden) {
    charts.delete(place);
  } else {
    charts.set(place, { ...target, seconds: charts.get(place)?.seconds ?? 900 });
    if (!place.firstChild) furnish(place);
    draw(place);
  }
  if (frame) show();
}

function furnish(place) {
  const ranges = make("div.ranges");
  ranges.setAttribute("role", "group");
  ranges.setAttribute("aria-label", "Range");
  for (const [text, seconds] of RANGES) {
    const each = button(
      text,
      () => {
        charts.get(place).seconds = seconds;
        for (const other of ranges.children) other.setAttribute("aria-pressed", String(other === each));
        draw(place);
      },
      "button.plain",
    );
    each.setAttribute("aria-pressed", String(seconds === 900));
    ranges.append(each);
  }
  const legend = make(
    "div.keys",
    make("span", make("i.used"), "used (driver)"),
    make("span", make("i.held"), "held by its pools"),
    make("span", make("i.live"), "live"),
  );
  place.append(
    make("div.head", legend, ranges),
    make("div.plot", make("span.top"), make("span.from"), make("span.to")),
    make("p.said"),
  );
}

async function past(target, signal, since) {
  const resolution = RANGES.find(([, seconds]) => seconds === target.seconds)[2];
  const query = new URLSearchParams({ uuid: target.uuid, signal, since, resolution });
  if (target.pid) query.set("pid", target.pid);
  const answer = await read(`api/v1/history?${query}`);
  return answer.ok ? answer.json() : { points: [], resolution_seconds: null };
}

async function draw(place) {
  const target = charts.get(place);
  if (!target || !frame) return;
  const to = frame.snapshot.taken_at;
  const from = to - target.seconds;
  let series;
  try {
    series = await Promise.all(["used", "held", "live"].map((signal) => past(target, signal, from)));
  } catch {
    return; // the daemon does not answer: a notice says so
  }
  if (charts.get(place) !== target || from !== to - target.seconds) return; // something else was asked for meanwhile
  for (const one of series) one.points = one.points.filter((point) => point.at <= to);
  const [used, held, live] = series.map((one) => one.points);
  const first = Math.min(...series.flatMap((one) => one.points.slice(0, 1).map((point) => point.at)));
  const start = Math.max(from, Math.min(first, to - 10));
  const top = Math.max(1, ...series.flatMap((one) => one.points.map((point) => point.high)));
  const gap = Math.max(
    3 * (used.length > 1 ? (used.at(-1).at - used[0].at) / (used.length - 1) : 1),
    3 * (series[0].resolution_seconds ?? 1),
  );
  const x = (at) => ((1000 * (at - start)) / (to - start)).toFixed(1);
  const y = (bytes) => (100 - (96 * bytes) / top).toFixed(2);
  const plot = place.querySelector(".plot");
  plot.querySelector("svg")?.remove();
  const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" });
  drawing.append(
    svg("path", {
      class: "live",
      d: runs(live, gap)
        .map(
          (run) =>
            `M${x(run[0].at)} 100${run.map((p) => `L${x(p.at)} ${y(p.median)}`).join("")}L${x(run.at(-1).at)} 100Z`,
        )
        .join(""),
    }),
  );
  for (const [kind, points] of [
    ["held", held],
    ["used", used],
  ]) {
    const line = (run) => run.map((p, place) => `${place ? "L" : "M"}${x(p.at)} ${y(p.median)}`).join("");
    if (used !== points || series[0].resolution_seconds === null) {
      drawing.append(svg("path", { class: kind, d: runs(points, gap).map(line).join("") }));
      continue;
    }
    const band = (run) =>
      `M${run.map((p) => `${x(p.at)} ${y(p.high)}`).join("L")}L${[...run]
        .reverse()
        .map((p) => `${x(p.at)} ${y(p.low)}`)
        .join("L")}Z`;
    drawing.append(
      svg("path", { class: "band", d: runs(points, gap).map(band).join("") }),
      svg("path", { class: kind, d: runs(points, gap).map(line).join("") }),
    );
  }
  plot.prepend(drawing);
  put(plot.querySelector(".top"), human(top));
  put(plot.querySelector(".from"), clock(start));
  put(plot.querySelector(".to"), clock(to));
  const said = used.length
    ? `Used between ${human(Math.min(...used.map((p) => p.low)))} and ${human(Math.max(...used.map((p) => p.high)))} in ${duration(to - start)}; ${human(used.at(-1).median)} last.`
    : "Nothing is known of its past.";
  drawing.setAttribute("aria-label", said);
  put(place.querySelector(".said"), said);
}

function svg(kind, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** The points in runs without a gap: what was not seen is not drawn. */
function runs(points, gap) {
  const all = [];
  for (const point of points) {
    if (all.length && point.at - all.at(-1).at(-1).at <= gap) all.at(-1).push(point);
    else all.push([point]);
  }
  return all;
}

// ---- events

let stream = null;
const told = new Map();

function tell(event) {
  if (told.has(event.id)) return;
  told.set(event.id, event);
  if (told.size > EVENTS_SHOWN) told.delete(Math.min(...told.keys()));
}

function showEvents() {
  const newest = [...told.values()].sort((one, other) => other.id - one.id);
  sync(
    $("events"),
    newest,
    (event) => event.id,
    (event) => make("li", make("time", clock(event.at)), make("b", clean(event.kind)), named(event.summary, 400)),
    (node, event) => {
      node.className = clean(event.kind);
    },
  );
  $("no-events").hidden = newest.length > 0;
  $("events").hidden = !newest.length;
}

async function recall() {
  try {
    const answer = await read("api/v1/events", { Accept: "application/json" });
    if (answer.ok) (await answer.json()).slice(-EVENTS_SHOWN).forEach(tell);
    showEvents();
  } catch {
    // a notice says that the daemon does not answer
  }
}

let following = 0;
function follow() {
  stream?.close();
  clearTimeout(following);
  if (document.hidden) return;
  const again = () => (following = setTimeout(follow, 5000));
  if (closed) {
    recall().then(again); // a stream cannot show a token
    return;
  }
  stream = new EventSource("api/v1/events");
  for (const kind of EVENTS) {
    stream.addEventListener(kind, (message) => {
      tell(JSON.parse(message.data));
      showEvents();
    });
  }
  stream.addEventListener("open", recall); // once it is open, so that nothing lies between the past and the stream
  stream.addEventListener("error", () => stream.readyState === EventSource.CLOSED && again());
}

// ---- who may change something

const STORED = "gpumond-token";
let token = sessionStorage.getItem(STORED) ?? "";

function keep(value) {
  token = value;
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
  put($("sign"), value ? "Sign out" : "Sign in");
}

/** Asks for a token; false if nobody gave one. */
function signIn(refusal = "") {
  const dialog = $("signing");
  put($("refused"), refusal);
  $("token").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true }),
  );
}

$("signing")
  .querySelector("form")
  .addEventListener("submit", (event) => {
    event.preventDefault();
    keep($("token").value.trim());
    $("token").value = "";
    $("signing").close("given");
  });
$("sign-cancel").addEventListener("click", () => $("signing").close());
$("sign").addEventListener("click", () => (token ? keep("") : signIn()));

/** POST with the token; asks for another one as long as it is refused. Null: given up. */
async function change(path, body) {
  let refusal = "";
  for (;;) {
    if ((!token || refusal) && !(await signIn(refusal))) return null;
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    const said = await answer.json();
    if (answer.status !== 401) return { ok: answer.ok, ...said };
    keep("");
    refusal = "That token was not accepted.";
  }
}

// ---- flush: plan, question, receipt

let asked = 0; // the newest dialog: an answer to an older one is not shown in it

async function flush(target, whom) {
  const mine = ++asked;
  const dialog = $("flush");
  const now = $("flush-now");
  const say = (title, words, receipts = []) => {
    put($("flush-title"), title);
    put($("flush-words"), words);
    showReceipts(receipts);
  };
  const ask = async (dryRun) => {
    const answer = await attempt({ target, dry_run: dryRun });
    if (answer === null && mine === asked) dialog.close();
    return mine === asked && dialog.open ? answer : null;
  };
  say(`Flush ${clean(whom, 120)}?`, "Asking for the plan…");
  put($("flush-close"), "Cancel");
  now.hidden = true;
  dialog.showModal();
  const plan = await ask(true);
  if (!plan) return;
  const planned = (plan.receipts ?? []).filter((receipt) => receipt.outcome === "planned");
  const [low, high] = ["low", "high"].map((key) => sum(planned.map((receipt) => receipt.expected?.[key] ?? 0)));
  const words = high
    ? `${extent({ low, high })} are expected back. The programs go on; each stalls for a moment, and takes memory again when it needs it.`
    : "There is nothing to give back.";
  say($("flush-title").textContent, plan.detail ?? words, plan.receipts);
  now.hidden = !high;
  now.disabled = false;
  now.onclick = async () => {
    now.disabled = true;
    put($("flush-words"), "Flushing…");
    const answer = await ask(false);
    keepLooking();
    if (!answer) return;
    say(`Flush of ${clean(whom, 120)}`, answer.detail ?? `${human(answer.released_bytes)} came back.`, answer.receipts);
    now.hidden = true;
    put($("flush-close"), "Close");
    $("flush-close").focus();
  };
  if (high) now.focus();
}

const extent = ({ low, high }) => (low === high ? human(low) : `${human(low)} to ${human(high)}`);

async function attempt(body) {
  try {
    return await change("api/v1/flushes", body);
  } catch {
    return {
      ok: false,
      detail:
        "The daemon does not answer. Whether anything was flushed is not known here: see its receipts when it is back.",
    };
  }
}

$("flush-close").addEventListener("click", () => $("flush").close());

function showReceipts(receipts = []) {
  $("receipts").replaceChildren(
    ...receipts.map((receipt) => {
      const device = byDevice.get(receipt.device_uuid);
      const head = make(
        "h3",
        named(receipt.workload || "a program", 80),
        ` pid ${receipt.pid}`,
        make(`span.outcome.${clean(receipt.outcome, 20)}`, clean(receipt.outcome, 20)),
      );
      const facts = make("dl");
      const fact = (term, value) => facts.append(make("div", make("dt", term), make("dd", named(value))));
      const where = [receipt.allocator, device && label(device)].filter(Boolean).join(" on ");
      if (where) fact("pool", where);
      const { expected, before, after } = receipt;
      if (expected) fact("expected", extent(expected));
      if (before && receipt.outcome === "planned") {
        fact("held", human(before.held_bytes));
        fact("live", human(before.live_bytes));
      }
      if (receipt.outcome !== "planned") {
        fact("came back", human(receipt.released_bytes));
        fact("driver saw", human(receipt.driver_released_bytes));
        if (before && after) fact("held", `${human(before.held_bytes)} → ${human(after.held_bytes)}`);
        fact(
          "took",
          receipt.duration_seconds < 1
            ? `${Math.ceil(1000 * receipt.duration_seconds)} ms`
            : `${receipt.duration_seconds.toFixed(1)} s`,
        );
        const steps = receipt.steps.map((step) => `${step.step} ${human(step.released_bytes)}`).join(", ");
        if (steps) fact("steps", steps);
      }
      const remarks = [
        receipt.reason,
        receipt.raced ? "The program allocated meanwhile, so that the two counts may differ." : "",
      ].filter(Boolean);
      return make("article", head, facts, ...remarks.map((remark) => make("p.quiet", named(remark, 400))));
    }),
  );
}

$("flush-all").addEventListener("click", () => flush({ all: true }, "all programs"));

// ---- all of it

function show() {
  byDevice = new Map((frame?.snapshot.devices ?? []).map((device) => [device.uuid, device]));
  showNotices();
  const withdrawn = failures > MISSED_LIMIT || !frame;
  $("content").hidden = withdrawn;
  $("content").classList.toggle("old", failures > 0);
  if (withdrawn) {
    document.title = `gpumond ${location.host}`;
    put($("moment"), "");
    return;
  }
  const { taken_at, seq, source } = frame.snapshot;
  put(
    $("moment"),
    `${clock(taken_at)} · ${source.driver_version?.startsWith(source.name) ? source.driver_version : [source.name, source.driver_version].filter(Boolean).join(" ")}`,
  );
  document.documentElement.dataset.seq = String(seq);
  put($("version"), `gpumond ${frame.version}`);
  showDevices();
  showAlerts();
  showVerdicts();
  showProcesses();
}

put($("host"), location.host);
keep(token);
showColumns();
$("filter").addEventListener("input", () => {
  filter = $("filter").value.trim();
  if (frame) showProcesses(true);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, dialog")) return;
  event.preventDefault();
  $("filter").focus();
});
document.addEventListener("visibilitychange", () => {
  keepLooking();
  follow();
});
setInterval(() => {
  if (!document.hidden) for (const place of charts.keys()) place.isConnected ? draw(place) : charts.delete(place);
}, CHART_PAUSE);
keepLooking();
follow();
