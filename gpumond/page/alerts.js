// The view of alerts: those that are active and those that have ended, with links to their charts and runbooks,
// and the actions of their cards.

import { linkTo } from "./address.js";
import { alertText, breachOf, isEnded, levelOf } from "./cards.js";
import { button, make, sync } from "./elements.js";
import { clean, clock, duration } from "./format.js";
import { createListing } from "./viewtables.js";
import { actsOf, keyOf } from "./problems.js";
import { between, rangeText } from "./range.js";
import { label, state } from "./state.js";
import { read } from "./live.js";
import { addView } from "./views.js";
import { RUNBOOKS } from "./words.js";

const MARGIN = 300; // seconds that a chart shows before and after an alert

const runbooks = new Set(RUNBOOKS);
const now = () => state.frame.snapshot.taken_at;
const beginOf = (alert) => alert.fired_at ?? alert.active_at;
/** When the breach ended: an alert may be resolved later. */
const endOf = (alert) => breachOf(alert, alert.resolved_at ?? now())[1];

function subjectOf({ labels, pid }) {
  const device = state.devices.get(labels.uuid);
  const program = labels.workload || labels.engine;
  const process = pid && (program ? `${program} (pid ${pid})` : `pid ${pid}`);
  return [process || program, device ? label(device) : labels.gpu && `GPU ${labels.gpu}`].filter(Boolean).join(" on ");
}

/** The address of the charts of an alert's subject while it was active. */
function chartOf(alert) {
  const device = state.devices.get(alert.labels.uuid);
  if (!device) return "";
  const range = rangeText(between(beginOf(alert) - MARGIN, endOf(alert) + MARGIN, now()));
  const found = { gpu: device.index, range };
  return linkTo(alert.pid ? { ...found, open: `${device.index}:${alert.labels.workload || alert.pid}` } : found);
}

const COLUMNS = [
  { title: "Alert", text: ({ rule }) => rule },
  { title: "Subject", text: subjectOf, name: true },
  { title: "State", text: (alert) => (isEnded(alert) ? "ended" : alert.phase) + (alert.silenced_by?.length ? ", silenced" : ""), update: (cell, alert) => (cell.className = levelOf({ alert })) },
  { title: "Severity", text: ({ labels }) => labels.severity ?? "", wide: true },
  { title: "Since", text: (alert) => clock(beginOf(alert), now()) },
  { title: "Duration", text: (alert) => duration(endOf(alert) - beginOf(alert)), number: true },
  { title: "Summary", text: ({ notes }) => alertText(notes), long: true },
  { title: "Actions", nodes: () => [make("a", "Chart"), make("a", "Runbook"), make("a", "Case"), make("div.acts")], update: showActions },
];

function showActions(cell, alert) {
  const [chart, runbook, oomCase, acts] = cell.children;
  const href = chartOf(alert);
  chart.hidden = !href;
  chart.href = href;
  chart.ariaLabel = `Chart of ${alert.rule} since ${clock(beginOf(alert), now())}`;
  runbook.hidden = !runbooks.has(alert.rule);
  runbook.href = `docs/runbooks/${encodeURIComponent(alert.rule)}`;
  runbook.ariaLabel = `Runbook of ${alert.rule}`;
  const id = alert.notes.case; // of an out-of-memory error
  oomCase.hidden = !id;
  oomCase.href = linkTo({ view: "cases", case: id });
  oomCase.ariaLabel = `Case of ${clean(subjectOf(alert), 100)}`;
  sync(
    acts,
    alert.resolved_at ? [] : actsOf(alert),
    ([word]) => word,
    ([word]) => {
      const act = button(word, () => act.run(), "button.plain");
      act.ariaLabel = clean(`${word} ${alert.rule} ${subjectOf(alert)}`, 200);
      return act;
    },
    (act, [, run]) => (act.run = run),
  );
}

const record = ({ rule, phase, active_at, fired_at, resolved_at = null, value, pid, labels, notes: { summary = null } }) =>
  ({ rule, phase, active_at, fired_at, resolved_at, value, pid, labels: JSON.stringify(labels), summary });

const NONE = "No alert has fired yet. Open Rules to see when one does.";
let section;

async function load() {
  const answer = await read("api/v1/alerts/history");
  if (!answer.ok) return;
  const all = [...state.frame.alerts, ...(await answer.json())];
  const entries = all.map((alert) => ({
    ...alert,
    labels: Object.fromEntries(alert.labels),
    notes: Object.fromEntries(alert.annotations),
  }));
  section.show(entries.sort((one, other) => !!one.resolved_at - !!other.resolved_at || beginOf(other) - beginOf(one)));
}

addView("alerts", () => (section = createListing("Alert history", COLUMNS, keyOf, record, NONE)), load);
