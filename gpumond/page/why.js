// What the live memory of a program consists of: the dialog of a process.

import { $, named, put } from "./elements.js";
import { attempt, entryOf } from "./flush.js";
import { clean, clock, human, percent, sum } from "./format.js";
import { MEANINGS } from "./meanings.js";
import { save } from "./session.js";
import { label, state } from "./store.js";

const CLASSES = {
  parameters: "parameters",
  gradients: "gradients",
  optimizer: "optimizer state",
  buffers: "buffers",
  tensors: "other leaf tensors",
  activations: "activations and the rest",
};
const REGISTERED = 4; // number of classes that need no search of the heap: the first ones
let newest = 0; // number of the newest dialog: it does not show answers to an older one

export async function why(pid, subject) {
  const own = ++newest;
  const dialog = $("why");
  const show = (text, entries = []) => {
    put($("why-words"), text, 600);
    $("why-classes").replaceChildren(...state.frame.processes.filter((row) => row.pid === pid).flatMap(entryOfShares), ...entries);
  };
  put($("why-title"), `Memory of ${clean(subject, 120)}`);
  show("Waiting for the program, which may pause for up to 250 ms…");
  Object.assign($("why-snapshot"), { onclick: () => saveSnapshot(pid), disabled: true });
  dialog.showModal();
  const answer = await attempt(`agents/${pid}/why`, {}, "The daemon doesn't respond.");
  if (own !== newest) return;
  $("why-snapshot").disabled = false;
  const entries = answer?.classes?.map((found) => entryOfClasses(found, answer.kv_cache_bytes));
  if (answer) show(answer.detail ?? wordsOf(answer), entries);
  else dialog.close();
}

function wordsOf(answer) {
  const pause = answer.paused_seconds >= 0.001 && `the program paused for at most ${Math.round(1000 * answer.paused_seconds)} ms`;
  const age = answer.age_seconds >= 0.1 && `as of ${answer.age_seconds.toFixed(1)} s ago`;
  return [answer.reason, ...answer.advice, pause, age].filter(Boolean).join("; ");
}

async function saveSnapshot(pid) {
  const own = newest;
  const show = (text) => own === newest && put($("why-words"), text, 600);
  show("Writing the snapshot…");
  const dump = await attempt(`agents/${pid}/snapshot`, {}, "The daemon doesn't respond.");
  if (!dump?.ok) return show(dump?.detail ?? "");
  const name = clean(dump.path.split("/").pop(), 200);
  show(`Fetching ${name} (${human(dump.size_bytes)})…`);
  const refusal = await save(`api/v1/agents/${pid}/snapshots/${dump.id}`, name).catch(() => "The transfer was interrupted.");
  show(refusal || `${name} is saved; to view a PyTorch snapshot, open pytorch.org/memory_viz.`);
}

const HELD = ["live", "cached", "stranded"];

/** What the pools of a process hold on one device, and what of it a flush releases. */
function entryOfShares(row) {
  const known = HELD.map((share) => [share, row[`${share}_bytes`]]).filter(([, bytes]) => bytes !== null);
  const held = sum(known.map(([, bytes]) => bytes));
  if (!held) return [];
  const facts = known.map(([share, bytes]) => [share, `${human(bytes)} (${percent(bytes, held)})`]);
  const remarks = known.slice(1).map(([share, bytes]) => bytes && `${share}: ${MEANINGS[share]}`);
  return [entryOf([named(row.device ? label(row.device) : row.device_uuid, 40), `${human(held)} held at ${clock(state.frame.snapshot.taken_at)}`], facts, remarks)];
}

function entryOfClasses(found, kvCache) {
  const part = (bytes) => `${human(bytes)} (${Math.round((100 * bytes) / (found.live_bytes || 1))}%)`;
  const known = Object.entries(CLASSES).filter(([name]) => found[`${name}_bytes`] !== null);
  const facts = known.map(([name, text]) => [text, part(found[`${name}_bytes`])]);
  const rest = found.live_bytes - known.reduce((sum, [name]) => sum + found[`${name}_bytes`], 0);
  if (known.length < Object.keys(CLASSES).length)
    facts.push([known.length < REGISTERED ? "unknown" : "other tensors and activations", part(Math.max(0, rest))]);
  const device = state.devices.get(found.device_uuid);
  const where = `${device ? ` on ${label(device)}` : ""}: ${human(found.live_bytes)} live when asked`;
  const ofKvCache = kvCache !== null && `${human(kvCache)} of the other leaf tensors are KV cache.`;
  return entryOf([named(found.allocator, 40), where], facts, [ofKvCache]);
}

$("why-close").addEventListener("click", () => $("why").close());
