// Suspends a program, or resumes it: a button in the details of a process.

import { button, make, put } from "./elements.js";
import { suspend } from "./flushdialog.js";
import { WAITING } from "./processlist.js";
import { attempt } from "./session.js";

const WAIT_SECONDS = 600;

/** The button, and the words about its last resumption. `itemOf` returns the current row. */
export function createSuspension(itemOf) {
  const words = make("span");
  const act = button("", async () => {
    const { pid, program, suspended } = itemOf();
    put(words, "");
    if (!suspended) return suspend({ pid }, `${program} (pid ${pid})`);
    if (suspended === WAITING) return put(words, (await attempt("DELETE", `resumptions/${pid}`))?.detail ?? "", 400);
    put(words, "Resuming as soon as its memory is free…");
    const answer = await attempt("POST", "resumptions", { target: { pid }, wait_seconds: WAIT_SECONDS });
    put(words, answer ? wordsOf(answer) : "", 400);
  });
  return make("p.suspension", act, " ", words);
}

/** What the button does. */
export const wordOf = ({ suspended }) => (suspended === WAITING ? "Cancel resuming" : suspended ? "Resume" : "Suspend");

export function updateSuspension(control, row) {
  const [act, words] = control.children;
  act.hidden = !row.suspension && !row.suspendable;
  act.disabled = row.suspended === "resuming";
  put(act, row.suspension ? wordOf(row) : "Suspend…");
  if (act.hidden) put(words, `To suspend ${row.program}, start it with gpumond run --suspendable.`, 200);
}

function wordsOf({ detail, receipts = [] }) {
  const [receipt] = receipts;
  if (!receipt) return detail ?? "";
  return [receipt.outcome, receipt.reason, receipt.remedy].filter(Boolean).join("; ");
}
