// Notices above everything else: faults, and reasons why the web UI shows no or stale data.

import * as address from "./address.js";
import { $, make, name, put, sync } from "./elements.js";
import { clock, duration, words } from "./format.js";
import { chosen } from "./selection.js";
import { label, state } from "./state.js";
import { TITLES } from "./views.js";
import { MISSED_LIMIT } from "./words.js";

const SHOWN = 8;

function unanswered() {
  const { cause, frame } = state;
  const what = frame ? `Showing values from ${clock(frame.snapshot.taken_at)}.` : "";
  if (cause === "connections")
    return [
      "bad",
      "This browser has too many connections to the daemon",
      `${what} The daemon is running, but this request is waiting for a free connection. Close other windows of this address.`,
    ];
  if (cause !== "unreachable") return ["bad", "The daemon refused the request", `${what} ${cause.detail ?? cause.title}`];
  return ["bad", "The daemon doesn't respond", `${what} This page retries every second. If the daemon has stopped, restart it.`];
}

function withoutFrame() {
  const { problem } = state;
  const titles = { 401: "Sign in to see this page", 403: "You don't have access", 503: "The daemon is starting" };
  const title = titles[problem?.status] ?? (problem ? "The daemon reports a problem" : "Connecting to the daemon");
  return ["note", title, problem?.detail ?? ""];
}

function* ofDriver({ source, devices }, faults) {
  if (!source.up) {
    const released = source.reason === "released";
    const title = released ? "Detached from the driver for maintenance" : `No GPU can be read (${source.reason})`;
    const fault = faults.find((each) => each.source === source.name && each.kind === source.reason);
    yield ["bad", title, withRemedy(source.detail, fault?.remedy)];
  } else if (!source.responsive) {
    const detail = `Data is from its last response, and is hidden after ${MISSED_LIMIT} missed readings.`;
    yield ["bad", "The driver doesn't respond", detail];
  } else if (!devices.length) {
    yield ["warn", "No GPU found", "The driver responds, but lists no GPUs."];
  }
}

function* notices() {
  if (state.failures) {
    yield unanswered();
    return;
  }
  if (!state.frame) {
    yield withoutFrame();
    return;
  }
  const view = address.read("view");
  if (view && !Object.hasOwn(TITLES, view)) yield ["warn", `This link's view, ${view}, doesn't exist`, "You see the overview."];
  if (address.read("gpu") && !chosen()) yield ["warn", `This link's GPU, ${address.read("gpu")}, doesn't exist`, "You see all GPUs."];
  const { snapshot, faults, conditions } = state.frame;
  const { source, seq, elapsed_seconds } = snapshot;
  const interval = elapsed_seconds / Math.max(1, seq);
  const age = (performance.now() - state.receivedAt) / 1000;
  if (!state.paused && age > Math.max(5, 3 * interval))
    yield ["bad", `No update for ${duration(age)}`, "The daemon responds, but has stopped taking readings."];
  yield* ofDriver(snapshot, faults);
  for (const fault of faults) {
    if (!source.up && fault.source === source.name && fault.kind === source.reason) continue;
    const device = state.devices.get(fault.device_uuid);
    yield ["warn", `${device ? label(device) : fault.source}: ${fault.kind}`, withRemedy(fault.detail, fault.remedy)];
  }
  for (const condition of conditions) {
    if (!condition.device_uuid) yield ["note", `This machine: ${words(condition.kind)}`, condition.remedy];
  }
}

/** The detail, followed by the remedy unless the detail contains it. */
function withRemedy(detail, remedy) {
  return !remedy || detail.includes(remedy) ? detail : [detail, remedy].filter(Boolean).join(": ");
}

export function showNotices() {
  const all = [...notices()];
  const shown = all.slice(0, SHOWN);
  if (all.length > SHOWN) shown.push(["note", `${all.length - SHOWN} more`, "Run: gpumond status"]);
  sync(
    $("notices"),
    shown,
    ([, title]) => title,
    () => make("p", make("strong"), " ", make("bdi")),
    (node, [level, title, detail]) => {
      node.className = level;
      put(node.firstChild, title, 300);
      name(node.lastChild, detail, 600);
    },
  );
}
