// What the cards of problems contain. No element of the document.

import { age, clock, duration, sizeText, percent, rate } from "./format.js";
import { callerText, isProblem, ordinary, processKey } from "./state.js";
import { REMEDIES, RUNBOOKS } from "./words.js";

const SEVERITY = { critical: 0, page: 0, warning: 1, info: 2 };
const ORDINARY_LABELS = ["alertname", "gpu", "severity", "uuid"];
const PAST = "memory-freed"; // no state, but something that has happened: events list it

const WARM_UP = 300; // seconds

/** How urgent an alert is: the lowest number first. */
export const rankOf = ({ phase, silenced_by: silences }, { severity }) => 10 * (phase !== "firing") + 20 * (silences.length > 0) + (SEVERITY[severity] ?? 1);

const subjectKey = (uuid, process) => `${uuid ?? ""} ${process?.pid ? processKey(process) : ""}`;

/** One card for each subject and problem of a frame: the alert and the verdict on it together; the most urgent first.
An alert that only informs has one when it fires. */
export function cardsOf(frame) {
  const cards = new Map();
  for (const alert of frame.alerts) {
    const labels = Object.fromEntries(alert.labels);
    if (alert.phase !== "firing" && labels.severity === "info") continue; // such as full load for a second
    const own = { ...alert, labels, notes: Object.fromEntries(alert.annotations) };
    const others = alert.pid ? [] : alert.labels.filter(([label]) => !ORDINARY_LABELS.includes(label));
    const key = `${alert.rule} ${subjectKey(labels.uuid, alert)} ${others}`;
    cards.set(key, { key, kind: alert.rule, uuid: labels.uuid, process: alert.pid ? alert : null, alert: own, verdict: null });
  }
  for (const verdict of frame.verdicts) {
    if (!isProblem(verdict)) continue;
    const subject = subjectKey(verdict.device_uuid, verdict);
    const same = [...cards.values()].find((card) => card.kind === verdict.kind && subjectKey(card.uuid, card.process) === subject);
    if (same) same.verdict = verdict;
    else {
      const key = `${verdict.kind} ${subject} `; // an alert on it continues the card
      const process = verdict.pid ? verdict : null;
      cards.set(key, { key, kind: verdict.kind, uuid: verdict.device_uuid, process, alert: null, verdict });
    }
  }
  const rank = ({ alert }) => (alert ? rankOf(alert, alert.labels) : 15);
  const since = ({ alert, verdict }) => alert?.fired_at ?? alert?.active_at ?? verdict.since;
  const left = ({ verdict }) => verdict?.time_to_full_seconds ?? 1e9;
  return [...cards.values()].sort((one, other) => rank(one) - rank(other) || left(one) - left(other) || since(one) - since(other));
}

/** True while a verdict tells more than an alert: there is none, or it doesn't fire yet. */
const isOnlyVerdict = ({ alert, verdict }) => !alert || (verdict && alert.phase !== "firing");

/** True if the breach of a firing alert has ended: it is resolved after its `keep_firing_for`. */
export const isEnded = ({ phase, notes }) => phase === "firing" && OVER.test(notes.summary);

const isOver = ({ kind, alert }, row) => (alert && isEnded(alert)) || (kind === "fragmentation" && row?.stranded_bytes === 0);

/** How a card is colored. Its problem may be over while its alert still fires. */
export function levelOf(card, row) {
  const { alert } = card;
  if (isOver(card, row) || alert?.silenced_by.length) return "quiet";
  if (isOnlyVerdict(card)) return "warn";
  if (alert.phase !== "firing") return "quiet";
  return { critical: "bad", page: "bad", info: "note" }[alert.labels.severity] ?? "warn";
}

const OVER = /^ended at ([\d:]{8}) UTC/; // in the text of an alert whose breach has ended
const AGAIN = /; again since ([\d:]{8}) UTC/; // and has come back

/** The last Unix time until `now` at which it was a time of day in UTC. */
const lastAt = (time, now) => now - ((now - Date.parse(`1970-01-01T${time}Z`) / 1000) % 86400);

/** Begin and end of the latest breach of an active alert, as its text states them. */
export function breachOf({ fired_at: fired, active_at: active, notes }, now) {
  const [, over] = OVER.exec(notes.summary) ?? [];
  const [, again] = AGAIN.exec(notes.summary) ?? [];
  const begin = again ? lastAt(again, now) : (fired ?? active);
  return [begin, over ? Math.max(begin, lastAt(over, now)) : now]; // the text has whole seconds
}

/** The state of a card at the time of the frame. */
export function ageOf(card, now, silences) {
  const { alert, verdict } = card;
  if (alert?.silenced_by.length) return silencedText(alert, now, silences);
  if (isOnlyVerdict(card)) return `verdict since ${clock(verdict.since, now)}`;
  const [begin, end] = breachOf(alert, now);
  if (isEnded(alert)) return `ended ${age(now - end)} ago, lasted ${duration(end - begin)}`;
  const word = alert.phase === "firing" ? alert.labels.severity || "firing" : "pending";
  return `${word} ${AGAIN.test(alert.notes.summary) ? `again since ${clock(begin, now)}` : `for ${age(now - begin)}`}`;
}

const silencesOf = (alert, silences) => silences.filter(({ id }) => alert?.silenced_by.includes(id));

function silencedText(alert, now, silences) {
  const ends = silencesOf(alert, silences).map((each) => each.ends_at);
  return ends.length ? `silenced until ${clock(Math.max(...ends), now)}` : "silenced";
}

/** Who silenced the alert of a card, and why. */
export const reasonsOf = ({ alert }, silences) =>
  silencesOf(alert, silences).map(({ author, reason }) => `${callerText(author)}: ${reason}`).join("; ");

/** The line of a card whose head states the subject. Its present values are those of `row`, the process, if it still exists. */
export function lineOf({ alert, verdict }, row, now, subject = "") {
  const evidence = Object.fromEntries(verdict?.evidence ?? []);
  const write = verdict && row && LINES[verdict.kind];
  if (!verdict && row && alert.rule === "fragmentation") return `${amountsOf(row)}; ${percent(alert.value, 1)} fragmented at its peak so far`;
  const text = write ? write(evidence, row, verdict, now) : withoutSubject(verdict ? textOf(verdict.summary) : sentenceOf(alert), subject);
  return text.replace(AGAIN, "").replace(/ \/\S+\//g, " "); // of paths, the names of the files
}

const SUBJECT = /^(?:(GPU \d+)(?: \([^)]*\))?|(\S+) \(pid \d+\)(?: on GPU \d+)?:?) /;

/** The text without the program and the device, if the subject states them. */
function withoutSubject(text, subject) {
  const [whole, device, program] = SUBJECT.exec(text) ?? [];
  return whole && subject.startsWith(device ?? program) ? text.slice(whole.length) : text;
}

/** What to do about a problem, for a process or a device. */
export function remedyOf(kind, { pid, device }) {
  const text = (REMEDIES[kind] ?? "").replace("PID", pid ?? "PID").replace("INDEX", device?.index ?? "INDEX");
  return textOf(text);
}

const HERE = { "oom show": "Case", flush: "Flush", suspend: "Suspend", why: "Why", status: "Processes" };

/** A text of the daemon: in place of each command, the name of what does the same here. */
const textOf = (text) => text.replace(/gpumond (oom show|flush|suspend|why|status)\b(?: --\w+ [\w-]+)?/g, (_, verb) => HERE[verb]);

/** What an alert states. What to do about one of a built-in rule is in its runbook. */
const sentenceOf = ({ rule, notes }) => alertText(RUNBOOKS.includes(rule) && notes.summary ? { summary: notes.summary } : notes);

export const alertText = ({ summary, description }) => textOf([summary, description].filter(Boolean).join("; "));

const held = ({ live_bytes: live, cached_bytes: cached, stranded_bytes: stranded }) => (live ?? 0) + (cached ?? 0) + (stranded ?? 0);

const amountsOf = (row) =>
  row.stranded_bytes ? `now ${sizeText(held(row))} held, ${sizeText(row.live_bytes)} live, ${sizeText(row.stranded_bytes)} stranded` : "nothing is stranded now";

const LINES = {
  leak: ({ slope_bytes_per_second: slope, window_seconds: seconds }, _, { since, retained_by: kept }, now) =>
    `since ${clock(since, now)}, ${rate(60 * slope)} in the last ${duration(seconds)}${kept && `; ${kept}`}`,
  fragmentation: ({ fragmentation_ratio: ratio, peak_live_bytes: live, peak_kept_bytes: kept }, row) =>
    `${amountsOf(row)}; when last measured, at most ${sizeText(live)} of ${sizeText(kept)} was live: ${percent(ratio, 1)} fragmented`,
};

/** When the device, which is named unless the `subject` ends with it, will be full at this rate, as the verdict's summary
states it; empty if it is unknown. */
export function leftOf({ verdict }, subject) {
  const [text = "", device, left] = /(?<=at this rate, )(.+?) will be (full [^,;]*)/.exec(verdict?.summary) ?? [];
  return device && subject.endsWith(device) ? left : text;
}

/** The bytes that the memory of a row or a device can reach: its limit, or until its device is full. Null if it is unknown. */
export function ceilingOf(row, device) {
  if (!row) return device.size_bytes;
  const limits = [row.quota?.soft_limit_bytes, row.limit_bytes, device.free_bytes === null ? null : row.used_bytes + device.free_bytes];
  const known = limits.filter((bytes) => bytes !== null && bytes !== undefined);
  return known.length ? Math.min(...known) : null;
}

/** How many verdicts there are of each kind that may become a problem, in words. The growth of a start is none. */
export function restOf({ snapshot, processes, verdicts }) {
  const counts = new Map();
  const starts = (verdict) => processes.some((row) => processKey(row) === processKey(verdict) && snapshot.taken_at - row.started_at < WARM_UP);
  for (const each of verdicts)
    if (!ordinary(each) && !isProblem(each) && each.kind !== PAST && !starts(each)) counts.set(each.kind, (counts.get(each.kind) ?? 0) + 1);
  return counts.size ? `also: ${[...counts].map(([word, count]) => `${count} ${word}`).join(", ")}` : "";
}
