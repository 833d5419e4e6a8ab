// The preview of a rule: when it would have fired in the last hour, in charts of its subjects and as a list.

import { createChart, showRange } from "./chart.js";
import { make, named, put } from "./elements.js";
import { clock, duration, many } from "./format.js";
import { levelBytes, spansOf, summaryOf } from "./ruleform.js";
import { ask } from "./session.js";
import { label, state } from "./state.js";

const CHARTS = 4;
const LISTED = 20;
const HOUR = 3600;

let newest = 0; // number of the newest preview: answers to an older one are not shown

/** Requests and draws a preview. Returns the daemon's refusal, or an empty text. */
export async function showPreview(place, rule) {
  const own = ++newest;
  const says = make("p", "Evaluating the last hour…");
  says.setAttribute("role", "status");
  place.replaceChildren(says);
  const result = await ask("api/v1/rules/preview", rule);
  if (own !== newest) return "";
  if (!result.ok) {
    place.replaceChildren();
    return result.detail;
  }
  const found = spansOf(result, CHARTS);
  const { uuid } = state.frame.snapshot.devices[0] ?? {};
  const none = { uuid: rule.scope === "device" ? uuid : null, name: "", pid: null, spans: [] };
  const bound = (own) => levelBytes(rule, state.devices.get(own)?.size_bytes ?? null);
  const targets = (found.length ? found : [none]).map((target) =>
    target.uuid ? { ...target, bound: bound(target.uuid) } : { ...target, uuid },
  );
  showRange(HOUR);
  put(says, sentence(result));
  for (const target of targets.filter((each) => each.uuid))
    place.append(make("h4", named(titleOf(target), 120)), createChart(target));
  place.append(make("ul", ...result.fired.slice(-LISTED).reverse().map((alert) => entryOf(alert, result.to_at))));
  return "";
}

function sentence({ fired, omitted, snapshots, from_at: from, to_at: to, resolution_seconds: each }) {
  if (!snapshots) return "There is no data yet.";
  const times = fired.length + omitted;
  const would = times ? `would have fired ${many(times, "time")}` : "would not have fired";
  const span = `between ${clock(from, to)} and ${clock(to)}`;
  const basis = `${many(snapshots, "snapshot")}, one every ${duration(each)}; shorter events aren't included`;
  return `The rule ${would} ${span}. ${basis}.`;
}

/** The subject of a chart. The chart of a subject without a device is that of the first device. */
function titleOf({ uuid, name, pid }) {
  const device = state.devices.get(uuid);
  return [name && `${name}, chart of`, device ? label(device) : uuid, pid && `pid ${pid}`].filter(Boolean).join(" ");
}

function entryOf(alert, to) {
  const from = alert.fired_at ?? alert.active_at;
  const end = alert.resolved_at ?? to;
  const when = `${clock(from, to)} to ${alert.resolved_at ? clock(end, to) : "now"} (${duration(end - from)}): `;
  return make("li", make("time", when), named(summaryOf(alert), 400));
}
