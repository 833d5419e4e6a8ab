// The demo's captions: what is true of it now, and what to try. No element of the document.

import { cardsOf, levelOf } from "./cards.js";
import { sizeText } from "./format.js";

const [TRAINING, LEAKING] = ["train-llm", "notebook"]; // workloads of the demo
const LARGE = 2 * 2 ** 30; // bytes of a cache that is worth a caption
const LASTS = 20; // seconds for which a caption that stays true is shown, at least

/** The captions that are true of a frame, by kind; none if it is not the demo's. */
export function captionsOf(frame) {
  const { snapshot, processes, queue } = frame;
  const found = new Map();
  const leaking = processes.find(({ workload }) => workload === LEAKING);
  if (snapshot.source.name !== "sim" || !leaking) return found;
  const leak = cardsOf(frame).find((card) => card.verdict?.kind === "leak" && card.verdict.pid === leaking.pid);
  if (leak && levelOf(leak) !== "quiet") found.set("leak", `${LEAKING} retains more memory with each step. Under Problems, you see ${leak.verdict.retained_by ? "which line retains it, and " : ""}when the GPU will be full.`);
  for (const row of processes.filter(({ workload, cached_bytes: bytes }) => workload === TRAINING && bytes >= LARGE))
    found.set("cache", `${TRAINING} keeps ${sizeText(row.cached_bytes)} in its cache. A flush returns it while the program runs.`);
  for (const { id, workload, need_bytes: need, device_uuid: uuid } of queue) {
    const device = snapshot.devices.find((each) => each.uuid === uuid);
    const resumes = snapshot.suspended_programs.some(({ grants }) => grants.includes(id));
    found.set("queue", `${workload || "A program"} is waiting for ${sizeText(need)} on GPU ${device?.index ?? "?"}, and ${resumes ? "resumes" : "starts"} once it is free.`);
  }
  found.set("start", "The GPUs are simulated, the agents are real. Click a program for its history. Press ? for help.");
  return found;
}

/** The kind of caption to show at a time: the one that is `shown` while it is true, unless a new one waits. `told`: when
each kind was shown first, which this keeps. */
export function captionAt(found, shown, told, now) {
  const waiting = [...found.keys()].filter((kind) => !told.has(kind));
  const stays = found.has(shown) && (!waiting.length || now - told.get(shown) < LASTS);
  const kind = stays ? shown : (waiting[0] ?? found.keys().next().value);
  if (kind && !told.has(kind)) told.set(kind, now);
  return kind;
}
