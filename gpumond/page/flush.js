// The flush dialog: the plan, the confirmation and the receipts.

import { $, make, named, put } from "./elements.js";
import { clean, clock, extent, human, sum } from "./format.js";
import { differences } from "./receipts.js";
import { post } from "./session.js";
import { label, processKey, state } from "./store.js";
import { refresh } from "./live.js";

const UNANSWERED = "The daemon doesn't respond. Its receipts will show whether the flush took place.";

let newest = 0; // number of the newest dialog: it does not show answers to an older one

/** Asks the daemon for a plan, shows it, and flushes when it is confirmed. */
export async function flush(target, subject) {
  const own = ++newest;
  const dialog = $("flush");
  const now = $("flush-now");
  const show = (title, text, articles = []) => {
    put($("flush-title"), title);
    put($("flush-words"), text);
    $("receipts").replaceChildren(...articles);
  };
  const request = async (body) => {
    const answer = await attempt("flushes", { target, ...body });
    if (answer === null && own === newest) dialog.close();
    return own === newest && dialog.open ? answer : null;
  };
  const title = `Flush ${clean(subject, 120)}?`;
  show(title, "Requesting the plan…");
  put($("flush-close"), "Cancel");
  now.hidden = true;
  dialog.showModal();
  const answer = await request({ dry_run: true });
  if (!answer) return;
  const plan = answer.receipts ?? [];
  const planned = plan.filter((receipt) => receipt.outcome === "planned");
  const [low, high] = ["low", "high"].map((key) => sum(planned.map((receipt) => receipt.expected?.[key] ?? 0)));
  const effect = "The programs keep running: each pauses briefly, and reallocates memory when it needs it.";
  const text = high ? `This flush should release ${extent({ low, high })}. ${effect}` : "Nothing to release.";
  show(title, answer.detail ?? text, plan.map(planArticle));
  now.hidden = !high;
  now.disabled = false;
  now.onclick = async () => {
    now.disabled = true;
    put($("flush-words"), "Flushing…");
    const result = await request({ dry_run: false, plan: answer.id });
    refresh();
    if (!result) return;
    const receipts = (result.receipts ?? []).map((receipt) => receiptArticle(receipt, plan.find(samePool(receipt))));
    show(`Flush of ${clean(subject, 120)}`, result.detail ?? `${human(result.released_bytes)} released.`, receipts);
    now.hidden = true;
    put($("flush-close"), "Close");
    $("flush-close").focus();
  };
  if (high) now.focus();
}

export async function attempt(route, body, unanswered = UNANSWERED) {
  try {
    return await post(`api/v1/${route}`, body);
  } catch {
    return { ok: false, detail: unanswered };
  }
}

const samePool = (receipt) => (other) =>
  processKey(other) === processKey(receipt) && other.allocator === receipt.allocator && other.device_uuid === receipt.device_uuid;

function article(receipt, facts, remarks) {
  const device = state.devices.get(receipt.device_uuid);
  const pool = [receipt.allocator, device && label(device)].filter(Boolean).join(" on ");
  const outcome = clean(receipt.outcome, 20);
  const title = [named(receipt.workload || "a program", 80), ` pid ${receipt.pid}`, make(`span.outcome.${outcome}`, outcome)];
  return entryOf(title, [["pool", pool], ...facts], remarks);
}

/** An article of a dialog: a title, terms with values, and remarks. */
export function entryOf(title, facts, remarks) {
  const list = make("dl");
  for (const [term, value] of facts) if (value) list.append(make("div", make("dt", term), make("dd", named(value))));
  const texts = remarks.filter(Boolean).map((remark) => make("p.quiet", named(remark, 400)));
  return make("article", make("h3", ...title), list, ...texts);
}

function planArticle(receipt) {
  const { expected, before } = receipt;
  const facts = [
    ["expected", expected && extent(expected)],
    ["held", before && human(before.held_bytes)],
    ["live", before && human(before.live_bytes)],
  ];
  return article(receipt, facts, [receipt.reason]);
}

/** A receipt next to the plan that was confirmed for the same pool, if there is one. */
function receiptArticle(receipt, plan) {
  const { expected, before, after, duration_seconds: seconds } = receipt;
  const planned = plan?.expected && `${extent(plan.expected)} at ${clock(plan.started_at)}`;
  const facts = [
    ["planned", planned],
    ["expected at start", expected && extent(expected)],
    ["released", human(receipt.released_bytes)],
    ["counted by the driver", human(receipt.driver_released_bytes)],
    ["held", before && after && `${human(before.held_bytes)} → ${human(after.held_bytes)}`],
    ["took", seconds < 1 ? `${Math.ceil(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`],
    ["steps", receipt.steps.map((step) => `${step.step} ${human(step.released_bytes)}`).join(", ")],
  ];
  return article(receipt, facts, [...differences(receipt, plan), receipt.reason]);
}

$("flush-close").addEventListener("click", () => $("flush").close());
