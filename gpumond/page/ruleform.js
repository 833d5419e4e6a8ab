// Rules as text, and what the fields of the editor state as a rule.

import { duration, human } from "./format.js";

const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const TIMES = [["h", 3600], ["m", 60], ["s", 1]];
const FIELDS = new Set(["name", "scope", "value", "above", "below", "for", "labels"]);

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

const secondsText = (seconds) => (seconds ? (exactly(seconds, TIMES) ?? `${seconds}s`) : "");

const readable = (value, threshold) => (value.endsWith("_bytes") ? human(threshold) : thresholdText(value, threshold));

/** What a rule compares, such as `device used_ratio > 80%`. */
export function expression({ scope, value, above, below, match = {} }) {
  const labels = Object.entries(match).map(([label, pattern]) => `${label}=${pattern}`);
  const subject = labels.length ? `${scope} {${labels.join(", ")}}` : scope;
  return `${subject} ${value} ${above === undefined ? "<" : ">"} ${readable(value, above ?? below)}`;
}

export const hold = (rule) => (rule.for ? duration(rule.for) : "at once");

/** The editor's fields for a rule. `others`: the keys without a field, as JSON. */
export function fieldsOf(rule) {
  const { severity = "", ...labels } = rule.labels ?? {};
  const rest = Object.fromEntries(Object.entries(rule).filter(([key]) => !FIELDS.has(key)));
  const others = Object.keys(labels).length ? { labels, ...rest } : rest;
  return {
    name: rule.name ?? "",
    scope: rule.scope,
    value: rule.value,
    side: rule.above === undefined ? "below" : "above",
    threshold: thresholdText(rule.value, rule.above ?? rule.below),
    for: secondsText(rule.for),
    severity,
    others: Object.keys(others).length ? JSON.stringify(others, null, 1) : "",
  };
}

/** The rule that the fields state; `others` has no problem. */
export function ruleOf({ name, scope, value, side, threshold, severity, others, ...fields }) {
  const { labels = {}, ...rest } = others ? JSON.parse(others) : {};
  const all = severity ? { ...labels, severity } : labels;
  const rule = { name, scope, value, [side]: threshold, ...rest };
  if (fields.for) rule.for = fields.for;
  return Object.keys(all).length ? { ...rule, labels: all } : rule;
}

/** What is wrong with the text of `others`; empty if it is a JSON object. */
export function problemOf(others) {
  let found = {};
  try {
    if (others.trim()) found = JSON.parse(others);
  } catch {
    found = null;
  }
  const valid = found !== null && typeof found === "object" && !Array.isArray(found);
  return valid ? "" : 'Expected a JSON object, such as {"match": {"workload": "train-*"}}.';
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
