// Rules as text, and what the fields of the editor state as a rule.

import { BOOLEANS, EXCEEDING } from "./booleans.js";
import { duration, sizeText, words } from "./format.js";
import { VERDICTS } from "./words.js";

const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const TIMES = [["h", 3600], ["m", 60], ["s", 1]];
const FIELDS = new Set(["name", "scope", "value", "above", "below", "for", "keep_firing_for", "match", "labels", "annotations", "action"]);
const ACTIONS = ["flush", "suspend"];
const UNITS = { bytes: "Bytes", ratio: "Shares, in %", seconds: "Times", boolean: "Yes or no", count: "Counts" };
const SPELLED = { ecc: "ECC", gpu: "GPU", hw: "hardware", kv: "KV", nvlink: "NVLink", oom: "out-of-memory", ooms: "out-of-memory errors", pcie: "PCIe", sm: "SM", sw: "software", xid: "Xid" };
const SUFFIX = /_(bytes|ratio|seconds|celsius|watts|hertz|joules)$/;

const exactly = (number, units) => {
  const [unit, size] = units.find(([, each]) => number && number % each === 0) ?? [];
  return unit ? `${number / size}${unit}` : null;
};

/** A threshold as a rule states it, such as `80%`, `1GiB` or `5`. */
function thresholdText(value, threshold) {
  if (value.endsWith("_ratio")) return `${Number((100 * threshold).toPrecision(12))}%`;
  return (value.endsWith("_bytes") && exactly(threshold, SIZES)) || String(threshold);
}

/** The bytes at which a line states the threshold of a rule in a chart; null if the chart does not show the rule's value. */
export function levelBytes({ value, above, below }, size) {
  const [, number, unit] = /^(-?[\d.]+(?:e[-+]?\d+)?)\s*(%|\wiB)?$/.exec(String(above ?? below)) ?? [];
  const threshold = number === undefined ? null : number * (unit === "%" ? 0.01 : (Object.fromEntries(SIZES)[unit] ?? 1));
  if (threshold !== null && value === "used_ratio") return size && threshold * size;
  return ["used_bytes", "live_bytes", "held_bytes"].includes(value) ? threshold : null;
}

/** Why no value can be beyond a threshold, or what its unit is if it has none; empty if nothing is wrong. */
export function thresholdProblem({ scope, value, side, threshold }) {
  const ratio = value.endsWith("_ratio");
  if (!ratio && !BOOLEANS.includes(value)) return "";
  const [, number, unit] = /^([\d.]+)\s*(%?)$/.exec(threshold) ?? [];
  if (ratio && !unit) return "Write the threshold in %, such as 90%.";
  const never = side === "below" ? number <= 0 : !EXCEEDING.includes(`${scope} ${value}`) && number >= (ratio ? 100 : 1);
  return never ? `${wordsOf(value)} is never ${side} ${threshold}.` : "";
}

/** The daemon's refusal of a rule, with the labels of the fields in place of its keys. */
export const refusalText = (detail, labels) =>
  detail.replace(/^body[.:] ?(?:([\w.]+):)?/, (_, path = "") => {
    const key = path.split(".").reverse().find((each) => labels[each]);
    return labels[key] || path ? `${labels[key] ?? path}:` : "";
  });

const secondsText = (seconds) => (seconds ? (exactly(seconds, TIMES) ?? `${seconds}s`) : "");

/** The name of a value in words, without its unit. */
export const wordsOf = (value) => words(value.replace(SUFFIX, "")).replace(/ increase$/, " in 10 min").replace(/^ooms(?= in)/, "$& that retry_on_oom didn’t repeat").replace(/\w+/g, (word) => SPELLED[word] ?? word);

/** Names of values by the heading under which the editor lists them; those with rarer units are the last. */
export function groupsOf(units) {
  const groups = new Map([...Object.values(UNITS), "Other units"].map((title) => [title, []]));
  for (const [name, unit] of Object.entries(units)) groups.get(UNITS[unit] ?? "Other units").push(name);
  return [...groups].filter(([, names]) => names.length);
}

function readable(value, threshold) {
  if (value.endsWith("_bytes")) return sizeText(threshold);
  return value.endsWith("_seconds") ? duration(threshold) : thresholdText(value, threshold);
}

const pairsText = (pairs = {}, separator = "\n") => Object.entries(pairs).map(([name, value]) => `${name}=${value}`).join(separator);

/** The pairs that a text such as `workload=train-*, user=ann` states, or one with a pair on each line; null for what
isn't stated, which the daemon refuses. */
function pairsOf(text, separator = /\n\s*(?=\w+\s*=)/) {
  const pairs = text ? text.split(separator).map((each) => each.split(/=(.*)/s)) : [];
  return Object.fromEntries(pairs.map(([name, value]) => [name.trim(), value?.trim() ?? null]));
}

/** When a rule fires, in words, such as `device: used above 80%`. */
export function expression({ scope, value, above, below, match }) {
  const labels = pairsText(match, ", ");
  const subject = labels ? `${scope} (${labels})` : scope;
  const kind = value.replaceAll("_", "-");
  if (VERDICTS[kind] && above === 0) return `${subject} with the verdict ${kind}`;
  if (BOOLEANS.includes(value)) return `${subject}: ${above === undefined ? "not " : ""}${wordsOf(value)}`;
  return `${subject}: ${wordsOf(value)} ${above === undefined ? "below" : "above"} ${readable(value, above ?? below)}`;
}

export const hold = (rule) => (rule.for ? duration(rule.for) : "at once");

/** The editor's fields for a rule. `others`: the keys without a field, as JSON. */
export function fieldsOf(rule) {
  const { severity = "", ...labels } = rule.labels ?? {};
  const { suspend, cooldown, ...action } = rule.action ?? {};
  const rest = Object.fromEntries(Object.entries(rule).filter(([key]) => !FIELDS.has(key)));
  const others = { ...(rule.action && { action }), ...rest };
  return {
    name: rule.name ?? "",
    scope: rule.scope,
    value: rule.value,
    side: rule.above === undefined ? "below" : "above",
    threshold: thresholdText(rule.value, rule.above ?? rule.below),
    for: secondsText(rule.for),
    keep_firing_for: secondsText(rule.keep_firing_for),
    match: pairsText(rule.match, ", "),
    action: ACTIONS.filter((name) => rule.action?.[name]).join(" and "),
    cooldown: secondsText(cooldown),
    severity,
    labels: pairsText(labels),
    annotations: pairsText(rule.annotations),
    others: Object.keys(others).length ? JSON.stringify(others, null, 1) : "",
  };
}

/** The rule that the fields state; `others` has no problem. */
export function ruleOf({ name, scope, value, side, threshold, severity, match, labels, annotations, action, cooldown, others, ...fields }) {
  const { action: more, ...rest } = others ? JSON.parse(others) : {};
  const rule = { name, scope, value, [side]: threshold, labels: { ...pairsOf(labels), ...(severity && { severity }) }, ...rest };
  for (const name of ["for", "keep_firing_for"]) if (fields[name]) rule[name] = fields[name];
  if (match) rule.match = pairsOf(match, /,\s*(?=\w+=)/);
  if (annotations) rule.annotations = pairsOf(annotations);
  if (action) {
    const { flush = {}, ...settings } = more ?? {};
    const chosen = { flush, suspend: true };
    rule.action = { ...settings, ...(cooldown && { cooldown }), ...Object.fromEntries(action.split(" and ").map((each) => [each, chosen[each]])) };
  }
  return rule;
}

/** What is wrong with the text of `others`; empty if it is a JSON object that fits the action. */
export function problemOf({ others, action }) {
  let found = {};
  try {
    if (others.trim()) found = JSON.parse(others);
  } catch {
    found = null;
  }
  const valid = found !== null && typeof found === "object" && !Array.isArray(found);
  if (!valid) return 'Expected a JSON object, such as {"receivers": ["team"]}.';
  return found.action && !action ? 'Choose an action above, or remove "action" here.' : "";
}

/** The override that a change of a built-in rule's fields requires, with what the API overrides already. */
export function overrideOf(fields, { rule, enabled, overrides }) {
  const before = { ...fieldsOf(rule), enabled };
  const found = {};
  for (const name of ["threshold", "for", "severity", "enabled"]) {
    if (fields[name] !== before[name]) found[name] = name === "for" ? fields.for || "0s" : fields[name];
    else if (overrides[name]?.origin === "api") found[name] = overrides[name].value;
  }
  return found;
}

/** Intervals of a preview's alerts by their subject: a device, a process on it, or a `name` without a device; at most
`most` subjects, those with the newest alerts first. */
export function spansOf({ fired, to_at: to }, most) {
  const subjects = new Map();
  for (const alert of [...fired].reverse()) {
    const { uuid = null, workload, engine } = Object.fromEntries(alert.labels);
    const name = uuid ? "" : (workload ?? engine ?? "");
    const key = [uuid, name, alert.pid, alert.start_ticks].join();
    const target = { uuid, name, pid: alert.pid, start_ticks: alert.start_ticks, spans: [] };
    if (!subjects.has(key) && subjects.size < most) subjects.set(key, target);
    const from = alert.fired_at ?? alert.active_at;
    subjects.get(key)?.spans.push({ from, to: alert.resolved_at ?? to, summary: summaryOf(alert) });
  }
  return [...subjects.values()];
}

export const summaryOf = ({ rule, annotations }) => Object.fromEntries(annotations).summary ?? rule;
