// What the live memory of a program consists of: the dialog of a process.

import { $, named, put } from "./elements.js";
import { attempt, entryOf } from "./flush.js";
import { clean, human } from "./format.js";
import { save } from "./session.js";
import { label, state } from "./store.js";

const CLASSES = {
  parameters: "parameters",
  gradients: "gradients",
  optimizer: "optimizer state",
  buffers: "buffers",
  tensors: "other leaf tensors",
  activations: "activations, the rest",
};
let newest = 0; // number of the newest dialog: it does not show answers to an older one

export async function why(pid, subject) {
  const own = ++newest;
  const dialog = $("why");
  const show = (text, entries = []) => {
    put($("why-words"), text, 600);
    $("why-classes").replaceChildren(...entries);
  };
  put($("why-title"), `Memory of ${clean(subject, 120)}`);
  show("Waiting for the program, which pauses for up to 50 ms…");
  Object.assign($("why-snapshot"), { onclick: () => saveSnapshot(pid), disabled: true });
  dialog.showModal();
  const answer = await attempt(`agents/${pid}/why`, {}, "The daemon does not answer.");
  if (own !== newest) return;
  $("why-snapshot").disabled = false;
  const entries = answer?.classes?.map((found) => entryOfClasses(found, answer.kv_cache_bytes));
  if (answer) show(answer.detail ?? answer.advice.join("; "), entries);
  else dialog.close();
}

async function saveSnapshot(pid) {
  const own = newest;
  const show = (text) => own === newest && put($("why-words"), text, 600);
  show("Writing the snapshot…");
  const dump = await attempt(`agents/${pid}/snapshot`, {}, "The daemon does not answer.");
  if (!dump?.ok) return show(dump?.detail ?? "");
  const name = clean(dump.path.split("/").pop(), 200);
  show(`Fetching ${name} (${human(dump.size_bytes)})…`);
  const refusal = await save(`api/v1/agents/${pid}/snapshots/${dump.id}`, name).catch(() => "The transfer was interrupted.");
  show(refusal || `${name} is saved; pytorch.org/memory_viz shows a snapshot of PyTorch.`);
}

function entryOfClasses(found, kvCache) {
  const part = (bytes) => `${human(bytes)} (${Math.round((100 * bytes) / (found.live_bytes || 1))} %)`;
  const facts = Object.entries(CLASSES).map(([name, text]) => [text, part(found[`${name}_bytes`])]);
  const device = state.devices.get(found.device_uuid);
  const where = `${device ? ` on ${label(device)}` : ""}: ${human(found.live_bytes)} live`;
  const ofKvCache = kvCache !== null && `${human(kvCache)} of the other leaf tensors are KV cache.`;
  return entryOf([named(found.allocator, 40), where], facts, [found.exactness === "sampled" && "Sampled: time ran out.", ofKvCache]);
}

$("why-close").addEventListener("click", () => $("why").close());
