// The dialog of a flush or a suspension: the plan, the confirmation and the receipts.

import { $, make, named, put } from "./elements.js";
import { capital, clean, clock, extent, sizeText, sum } from "./format.js";
import { differences } from "./receipttexts.js";
import { change } from "./session.js";
import { label, processKey, state } from "./state.js";
import { refresh } from "./live.js";

const UNANSWERED = "The daemon doesn't respond. Its receipts will show whether the flush took place.";

let newest = 0; // number of the newest dialog: it does not show answers to an older one

/** Asks the daemon for a plan, shows it, and acts when it is confirmed. `kind`: how a flush or a suspension does that. */
async function confirm({ word, done, route, planned, result, planArticle, article }, target, subject) {
  const own = ++newest;
  const dialog = $("flush");
  const now = $("flush-now");
  const show = (title, text, articles = []) => {
    put($("flush-title"), title);
    put($("flush-words"), text);
    $("receipts").replaceChildren(...articles);
    dialog.scrollTop = 0;
  };
  const request = async (body) => {
    const answer = await change("POST", `api/v1/${route}`, { target, ...body }).catch(() => ({ ok: false, detail: UNANSWERED }));
    if (answer === null && own === newest) dialog.close();
    return own === newest && dialog.open ? answer : null;
  };
  const name = clean(subject, 120);
  show(`${word} ${name}?`, "Requesting the plan…");
  put($("flush-close"), "Cancel");
  put(now, `${word} now`);
  now.hidden = true;
  dialog.showModal();
  const answer = await request({ dry_run: true });
  if (!answer) return;
  const plan = answer.receipts ?? [];
  const text = planned(plan.filter((receipt) => receipt.outcome === "planned"));
  show(`${word} ${name}?`, answer.detail ?? (text || `Nothing to ${word.toLowerCase()}.`), folded(plan, planArticle));
  now.hidden = !text;
  now.disabled = false;
  now.onclick = async () => {
    now.disabled = true;
    put($("flush-words"), `${word}ing…`);
    const answered = await request({ dry_run: false, ...(answer.id && { plan: answer.id }) });
    refresh();
    if (!answered) return;
    const articles = folded(answered.receipts ?? [], (receipt) => article(receipt, plan.find(samePool(receipt))));
    show(`${done} of ${name}`, answered.detail ?? result(answered), articles);
    now.hidden = true;
    put($("flush-close"), "Close");
    $("flush-close").focus({ preventScroll: true });
  };
  if (text) now.focus({ preventScroll: true });
}

const isNothing = ({ outcome, expected }) => outcome === "nothing" || (outcome === "planned" && expected?.high === 0);

/** The articles of receipts. Those of several pools with nothing to release are folded to their number. */
function folded(receipts, articleOf) {
  const nothing = receipts.filter(isNothing);
  if (nothing.length < 2) return receipts.map(articleOf);
  const fold = make("details", make("summary", `Nothing to release: ${nothing.length} of ${receipts.length}`), ...nothing.map(articleOf));
  return [...receipts.filter((receipt) => !nothing.includes(receipt)).map(articleOf), fold];
}

const samePool = (receipt) => (other) =>
  processKey(other) === processKey(receipt) && other.allocator === receipt.allocator && other.device_uuid === receipt.device_uuid;

function articleOf(receipt, facts, remarks) {
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

const seconds = (time) => (time < 1 ? `${Math.ceil(1000 * time)} ms` : `${time.toFixed(1)} s`);

const FLUSH = {
  word: "Flush",
  done: "Flush",
  route: "flushes",
  planned(plan) {
    const [low, high] = ["low", "high"].map((key) => sum(plan.map((receipt) => receipt.expected?.[key] ?? 0)));
    const effect = "The programs keep running: each pauses briefly, and reallocates memory when it needs it.";
    return high ? `This flush should release ${extent({ low, high })}. ${effect}` : "";
  },
  result: ({ released_bytes: bytes }) => `${sizeText(bytes)} released.`,
  planArticle(receipt) {
    const { expected, before } = receipt;
    const facts = [
      ["expected", expected && extent(expected)],
      ["held", before && sizeText(before.held_bytes)],
      ["live", before && sizeText(before.live_bytes)],
    ];
    return articleOf(receipt, facts, [capital(receipt.reason)]);
  },
  /** A receipt next to the plan that was confirmed for the same pool, if there is one. */
  article(receipt, plan) {
    const { expected, before, after } = receipt;
    const facts = [
      ["planned", plan?.expected && `${extent(plan.expected)} at ${clock(plan.started_at)}`],
      ["expected at start", expected && extent(expected)],
      ["released", sizeText(receipt.released_bytes)],
      ["counted by the driver", sizeText(receipt.driver_released_bytes)],
      ["held", before && after && `${sizeText(before.held_bytes)} → ${sizeText(after.held_bytes)}`],
      ["took", seconds(receipt.duration_seconds)],
      ["steps", receipt.steps.map((step) => `${step.step} ${sizeText(step.released_bytes)}`).join(", ")],
    ];
    return articleOf(receipt, facts, [...differences(receipt, plan), capital(receipt.reason)]);
  },
};

function suspensionArticle(receipt) {
  const { expected_bytes: expected, released_bytes: released, host_bytes: host } = receipt;
  const amounts = [["expected", expected], ["released", released], ["on the host", host]];
  const facts = amounts.map(([term, bytes]) => [term, bytes !== null && sizeText(bytes)]);
  const took = receipt.outcome !== "planned" && seconds(receipt.duration_seconds);
  return articleOf(receipt, [...facts, ["took", took]], [receipt.reason, receipt.remedy]);
}

const SUSPENSION = {
  word: "Suspend",
  done: "Suspension",
  route: "suspensions",
  planned: (plan) =>
    plan.length ? `This should move ${sizeText(sum(plan.map((receipt) => receipt.expected_bytes)))} to the host. The program can’t use the GPU until it’s resumed.` : "",
  result: ({ receipts }) => receipts.map(({ outcome }) => outcome).join(", "),
  planArticle: suspensionArticle,
  article: suspensionArticle,
};

export const flush = (target, subject) => confirm(FLUSH, target, subject);
export const suspend = (target, subject) => confirm(SUSPENSION, target, subject);

$("flush-close").addEventListener("click", () => $("flush").close());
