// What the live memory of a program consists of: the dialog of a process.

import { linkTo } from "./address.js";
import { cardsOf, leftOf, lineOf, remedyOf } from "./cards.js";
import { siteText } from "./calls.js";
import { $, button, make, named, put } from "./elements.js";
import { entryOf, flush } from "./flushdialog.js";
import { capital, clean, clock, sizeText, percent, sum } from "./format.js";
import { MEANINGS } from "./meanings.js";
import { attempt, save } from "./session.js";
import { allowsFlush, isProblem, label, processOf, state } from "./state.js";

const CLASSES = {
  parameters: "parameters",
  gradients: "gradients",
  optimizer: "optimizer state",
  buffers: "buffers",
  tensors: "other leaf tensors",
  activations: "activations and the rest",
};
const RECORDED = 30; // seconds
const REGISTERED = 4; // number of classes that need no search of the heap: the first ones
let newest = 0; // number of the newest dialog: it does not show answers to an older one

export async function why(pid, subject) {
  const own = ++newest;
  const dialog = $("why");
  const show = (text, { classes = [], sites = [], ...answer } = {}) => {
    put($("why-words"), text, 600);
    const rows = state.frame.processes.filter((row) => row.pid === pid);
    const asked = new Set(classes.map((found) => found.device_uuid));
    $("why-classes").replaceChildren(
      ...entriesOfProblems(pid, subject),
      ...(sites.length ? [entryOfSites(sites, answer.unrecorded_bytes)] : []),
      ...rows.flatMap((row) => entryOfShares(row, asked.has(row.device_uuid))),
      ...classes.map((found) => entryOfClasses(found, answer.kv_cache_bytes)),
      ...(rows.length ? [nextSteps(rows, subject)] : []),
    );
  };
  const wait = (waits) => ["why-record", "why-snapshot"].forEach((id) => ($(id).disabled = waits));
  const request = async (words, body) => {
    show(words);
    wait(true);
    const answer = await attempt("POST", `agents/${pid}/why`, body);
    if (own !== newest) return;
    wait(false);
    if (answer) show(answer.detail ?? wordsOf(answer), answer);
    else dialog.close();
  };
  put($("why-title"), `Memory of ${clean(subject, 120)}`);
  $("why-snapshot").onclick = () => saveSnapshot(pid);
  $("why-record").onclick = () => request(`Recording the lines that allocate for ${RECORDED} s, which slows the program down…`, { record_seconds: RECORDED });
  put($("why-record"), `Record lines for ${RECORDED} s`);
  $("why-classes").replaceChildren();
  wait(true);
  dialog.showModal(); // before the request, over which the user may have to sign in
  await request("Waiting for the program, which may pause for up to 250 ms…", {});
}

/** The program's problems as their cards state them, and what retains memory that grows; errors with a link to their case. */
const entriesOfProblems = (pid, subject) =>
  [...cardsOf(state.frame), ...state.frame.verdicts.filter((verdict) => !isProblem(verdict) && verdict.retained_by).map((verdict) => ({ kind: verdict.kind, uuid: verdict.device_uuid, process: verdict, verdict }))]
    .filter(({ process }) => process?.pid === pid)
    .map((card) => {
      const found = card.alert?.notes.case;
      const link = found ? [Object.assign(make("a", "Case"), { href: linkTo({ view: "cases", case: found }) })] : [];
      const row = processOf(card.uuid, card.process);
      const texts = [leftOf(card, subject), lineOf(card, row, state.frame.snapshot.taken_at, subject)];
      return entryOf([make("b", capital(card.kind)), ...link], [], [`${capital(texts.filter(Boolean).join(" · "))}.`]);
    });

/** The lines that allocated what is live, after a recording. */
const entryOfSites = (sites, before) =>
  entryOf([make("b", "Live memory by the line that allocated it")], [], [...sites.map((site) => `${sizeText(site.size_bytes)}: ${siteText(site)}`), `${sizeText(before)}: allocated before the recording`]);

function wordsOf(answer) {
  const pause = answer.paused_seconds >= 0.001 && `the program paused for at most ${Math.round(1000 * answer.paused_seconds)} ms`;
  const age = answer.age_seconds >= 0.1 && `as of ${answer.age_seconds.toFixed(1)} s ago`;
  return capital([answer.reason, pause, age, ...answer.advice].filter(Boolean).join("; "));
}

async function saveSnapshot(pid) {
  const own = newest;
  const show = (text) => own === newest && put($("why-words"), text, 600);
  show("Writing the snapshot…");
  const dump = await attempt("POST", `agents/${pid}/snapshot`, {});
  if (!dump?.ok) return show(dump?.detail ?? "");
  const name = clean(dump.path.split("/").pop(), 200);
  show(`Fetching ${name} (${sizeText(dump.size_bytes)})…`);
  const refusal = await save(`api/v1/agents/${pid}/snapshots/${dump.id}`, name).catch(() => "The transfer was interrupted.");
  show(refusal || `${name} is saved; to view a PyTorch snapshot, open pytorch.org/memory_viz.`);
}

const HELD = ["live", "cached", "stranded"];

/** What the pools of a process hold on one device, and what of it a flush releases. `asked`: the program says what is live,
which may be another amount a moment later. */
function entryOfShares(row, asked) {
  const known = HELD.map((share) => [share, row[`${share}_bytes`]]).filter(([, bytes]) => bytes !== null);
  const held = sum(known.map(([, bytes]) => bytes));
  const listed = known.filter(([share, bytes]) => bytes && !(asked && share === "live"));
  if (!listed.length) return [];
  const facts = listed.map(([share, bytes]) => [share, asked ? sizeText(bytes) : `${sizeText(bytes)} (${percent(bytes, held)})`]);
  const remarks = listed.filter(([share]) => share !== "live").map(([share]) => `${share}: ${MEANINGS[share]}`);
  const total = asked ? "besides live memory" : `${sizeText(held)} held`;
  return [entryOf([named(row.device ? label(row.device) : row.device_uuid, 40), `${total} at ${clock(state.frame.snapshot.taken_at)}`], facts, remarks)];
}

/** What you can do now: the remedies of the program's problems, and a flush if it would release something. */
function nextSteps(rows, subject) {
  const [{ pid, start_ticks, workload }] = rows;
  const kinds = new Set(state.frame.verdicts.filter((verdict) => isProblem(verdict) && verdict.pid === pid).map(({ kind }) => kind));
  const remedies = [...kinds].map((kind) => remedyOf(kind, rows[0]).split("; ").filter((clause) => !/\b(Why|Flush)\b/.test(clause)).join("; ")).filter(Boolean);
  const bytes = sum(rows.filter(allowsFlush).map((row) => row.cached_bytes ?? 0));
  const others = bytes || remedies.length ? [] : ["A flush would release nothing: the program must free live memory first, or exit."];
  const entry = entryOf([make("b", "Next steps")], [], [...remedies.map(capital), ...others, bytes && `A flush releases about ${sizeText(bytes)} while the program runs: gpumond flush ${workload || pid}`]);
  if (bytes) entry.lastChild.append(" ", button("Flush…", () => $("why").close() ?? flush({ pid, start_ticks }, subject)));
  return entry;
}

function entryOfClasses(found, kvCache) {
  const part = (bytes) => `${sizeText(bytes)} (${percent(bytes, found.live_bytes || 1)})`;
  const known = Object.entries(CLASSES).filter(([name]) => found[`${name}_bytes`] !== null);
  const facts = known.map(([name, text]) => [text, found[`${name}_bytes`]]);
  const rest = found.live_bytes - sum(known.map(([name]) => found[`${name}_bytes`]));
  if (known.length < Object.keys(CLASSES).length)
    facts.push([known.length < REGISTERED ? "unknown" : "other tensors and activations", rest]);
  const device = state.devices.get(found.device_uuid);
  const where = `${device ? ` on ${label(device)}` : ""}: ${sizeText(found.live_bytes)} live`;
  const ofKvCache = kvCache !== null && `${sizeText(kvCache)} of the other leaf tensors are KV cache.`;
  const some = facts.filter(([, bytes]) => bytes > 0).map(([text, bytes]) => [text, part(bytes)]);
  return entryOf([named(found.allocator, 40), where], some, [ofKvCache]);
}

$("why-close").addEventListener("click", () => $("why").close());
