// Suspends a program, or resumes it: a button in the details of a process.

import { button, make, put } from "./elements.js";
import { attempt } from "./flush.js";
import { human } from "./format.js";

const WAIT_SECONDS = 600;
const CONFIRM_MILLISECONDS = 10_000;

/** The button, and the words about its last use. `itemOf` returns the current row. */
export function createSuspension(itemOf) {
  const words = make("span");
  let asked = -Infinity;
  const act = button("", async () => {
    const { pid, suspension } = itemOf();
    if (!suspension && performance.now() - asked > CONFIRM_MILLISECONDS) {
      asked = performance.now();
      put(words, "The program can’t use the GPU until you resume it. To suspend it, click again.");
      return;
    }
    put(words, suspension ? "Resuming as soon as its memory is free…" : "Suspending…");
    const [route, more] = suspension ? ["resumptions", { wait_seconds: WAIT_SECONDS }] : ["suspensions", {}];
    const answer = await attempt(route, { target: { pid }, ...more }, "The daemon doesn't respond.");
    put(words, answer ? wordsOf(answer) : "", 400);
  });
  return make("p.suspension", act, " ", words);
}

export function updateSuspension(control, row) {
  control.hidden = !row.suspension && !row.agent?.suspendable;
  put(control.firstChild, row.suspension ? "Resume" : "Suspend");
}

function wordsOf({ detail, receipts = [] }) {
  const [receipt] = receipts;
  if (!receipt) return detail ?? "";
  const bytes = receipt.released_bytes ? `${human(receipt.released_bytes)} released` : "";
  return [receipt.outcome, bytes, receipt.reason, receipt.remedy].filter(Boolean).join("; ");
}
