// The editor of a rule: its fields, its preview on the last hour, and its changes.

import { button, choice, control, labeled, make, put } from "./elements.js";
import { clean } from "./format.js";
import { showPreview } from "./preview.js";
import { fieldsOf, groupsOf, overrideOf, problemOf, refusalText, ruleOf, thresholdProblem, wordsOf } from "./ruleform.js";
import { attempt } from "./session.js";
import { read } from "./live.js";
import { reload } from "./views.js";

const OVERRIDDEN = ["threshold", "for", "severity", "enabled"]; // the fields of a built-in rule that can be changed
const WORD = "[a-z0-9_\\-]";

let valuesByScope = null; // names and units of the values that rules of each scope can compare
let meanings = {}; // of the values, by scope

/** Reads them from the description of the API, whose first request takes the daemon seconds. */
async function readValues() {
  const answer = await read("openapi.json", {}, 30_000);
  const found = (await answer.json()).components.schemas.RuleConfig.properties.value;
  [valuesByScope, meanings] = [found["x-values"], found["x-meanings"]];
}

const input = (properties) => control("input", { type: "text", autocomplete: "off", spellcheck: false, ...properties });

const area = (properties) => control("textarea", { rows: 2, spellcheck: false, ...properties });

/** Labels and controls of the fields, by name. */
const createFields = () => ({
  name: ["Name", input({ required: true, pattern: `${WORD}{1,64}`, title: "1 to 64 of a-z, 0-9, _ and -" })],
  scope: ["Scope", choice(Object.keys(valuesByScope).map((scope) => [scope]))],
  value: ["Value", choice([])],
  side: ["Condition", choice([["above"], ["below"]])],
  threshold: ["Threshold", input({ required: true, title: "such as 80%, 1GiB or 5" })],
  for: ["For", input({ placeholder: "at once", title: "such as 30s, 5m or 1h" })],
  keep_firing_for: ["Keep firing for", input({ title: "such as 5m; prevents flapping" })],
  severity: ["Severity", input({ pattern: `${WORD}{0,64}`, title: "such as info, warning or critical" })],
  match: ["Match", input({ placeholder: "workload=train-*, user=ann", title: "labels and patterns; all have to match" })],
  action: ["Action", choice([["", "none"], ["flush"], ["suspend"], ["flush and suspend"]])],
  cooldown: ["Cooldown", input({ placeholder: "10m", title: "minimum time between two actions for an alert, such as 10m" })],
  labels: ["Labels", area({ placeholder: "team=ml", title: "name=value, one per line" })],
  annotations: ["Annotations", area({ placeholder: "summary=…", title: "name=text, one per line; {value} and {threshold} are replaced" })],
  others: ["Other keys (JSON)", area({})],
  enabled: ["Enabled", control("input", { type: "checkbox" })],
});

function showValues({ scope, value }) {
  const before = value.value;
  const names = Object.keys(valuesByScope[scope.value]);
  const options = (each) => each.map((name) => control("option", { value: name }, wordsOf(name)));
  value.replaceChildren(...groupsOf(valuesByScope[scope.value]).map(([label, each]) => control("optgroup", { label }, ...options(each))));
  if (names.includes(before)) value.value = before;
}

/** What the chosen value is, and its name in configuration files. */
const meaningOf = ({ scope, value }) => `${value.value}: ${meanings[scope.value][value.value]}`;

function fill(controls, { rule, enabled }) {
  const texts = fieldsOf(rule);
  controls.scope.value = texts.scope;
  showValues(controls);
  for (const [name, text] of Object.entries(texts)) controls[name].value = text;
  controls.enabled.checked = enabled;
}

const given = ({ enabled, ...controls }) => ({
  ...Object.fromEntries(Object.entries(controls).map(([name, { value }]) => [name, value.trim()])),
  enabled: enabled.checked,
});

const routeOf = ({ name }) => `rules/${encodeURIComponent(name)}`;
const matching = ({ etag }) => ({ "If-Match": `"${etag}"` });

/** Sends the rule that the fields state. */
function save(fields, entry) {
  if (entry.origin === "built-in") return attempt("PUT", `${routeOf(entry)}/override`, overrideOf(fields, entry), matching(entry));
  const rule = ruleOf(fields);
  if (entry.origin) return attempt("PUT", routeOf(entry), rule, matching(entry));
  return attempt("POST", "rules", { annotations: { summary: `${wordsOf(fields.value)}: {value}, ${fields.side} {threshold}` }, ...rule });
}

function remove(entry) {
  const builtIn = entry.origin === "built-in";
  if (!confirm(`${builtIn ? "Restore the defaults of" : "Delete"} ${clean(entry.name, 80)}?`)) return null;
  return attempt("DELETE", builtIn ? `${routeOf(entry)}/override` : routeOf(entry), undefined, matching(entry));
}

/** Previews the rule that the fields state. Without `clear` if a built-in rule's threshold is changed: the daemon scales it. */
function preview(place, fields, entry) {
  const { clear, ...rule } = ruleOf(fields);
  const scaled = entry.origin === "built-in" && fields.threshold !== fieldsOf(entry.rule).threshold;
  return showPreview(place, scaled || clear === undefined ? rule : { ...rule, clear });
}

/** Shows the editor of a rule: a new one if its entry has no origin, an override of a built-in one. */
export async function edit(place, entry) {
  if (!valuesByScope) await readValues();
  const fields = createFields();
  const [labels, controls] = [0, 1].map((part) => Object.fromEntries(Object.entries(fields).map(([name, each]) => [name, each[part]])));
  labels.above = labels.below = labels.threshold;
  const builtIn = entry.origin === "built-in";
  const overridden = Object.values(entry.overrides).some(({ origin }) => origin === "api");
  const refusal = control("p", { role: "alert", className: "refused" });
  const refuse = (detail = "") => put(refusal, refusalText(detail, labels), 600);
  const drawn = make("div");
  const close = () => place.replaceChildren();
  const change = async (request) => {
    put(refusal, "");
    const answer = await request();
    if (!answer) return;
    refuse(answer.detail);
    if (!answer.ok) return;
    close();
    reload();
  };
  const erase = button(builtIn ? "Restore defaults" : "Delete", () => change(() => remove(entry)));
  erase.hidden = builtIn ? !overridden : !entry.origin;
  const look = button("Preview", async () => {
    if (form.reportValidity()) refuse(await preview(drawn, given(controls), entry));
  });
  const cells = Object.entries(fields).map(([name, [label, node]]) => {
    node.disabled = builtIn ? !OVERRIDDEN.includes(name) : entry.origin && name === "name";
    return labeled(label, node);
  });
  cells.at(-1).hidden = !builtIn;
  const meaning = make("p.quiet");
  cells.splice(3, 0, meaning);
  const explain = () => {
    put(meaning, meaningOf(controls), 600);
    controls.cooldown.parentNode.hidden = !controls.action.value;
    controls.others.setCustomValidity(problemOf(given(controls)));
    controls.threshold.setCustomValidity(thresholdProblem(given(controls)));
  };
  const submit = control("button", { type: "submit", className: "strong" }, "Save");
  const buttons = make("div.buttons", erase, button("Cancel", close), look, submit);
  const title = make("h3", entry.origin ? `Edit ${clean(entry.name, 80)}` : "New rule");
  const form = make("form.editor", title, make("div.fields", ...cells), refusal, buttons, drawn);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    change(() => save(given(controls), entry));
  });
  controls.scope.addEventListener("change", () => showValues(controls));
  form.addEventListener("input", explain);
  form.ariaLabel = title.textContent;
  fill(controls, entry);
  explain();
  place.replaceChildren(form);
  (builtIn ? controls.threshold : controls.name).focus();
}
