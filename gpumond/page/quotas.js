// The view of quotas: limits of processes, and who they apply to.

import { unset } from "./processfacts.js";
import { sizeText } from "./format.js";
import { createListing } from "./viewtables.js";
import { state } from "./state.js";
import { read } from "./live.js";
import { addView } from "./views.js";

const amount = (kind) => ({ quota }) => sizeText(quota[kind]);
const patterns = ({ quota: { match } }) => Object.entries(match ?? {}).filter(([, pattern]) => pattern);

const KINDS = ["soft_limit", "limit", "reserve", "cgroup_limit"];

/** Processes to which a quota applies. */
function users({ name }) {
  const applies = ({ quota }) => quota && KINDS.some((kind) => quota[`${kind}_quota`] === name);
  const own = state.frame.processes.filter(applies);
  const remarks = (row) => [sizeText(row.used_bytes), row.quota.soft_limit_quota === name && excess(row), row.quota.limit_quota === name && (unset(row) || uncounted(row))].filter(Boolean).join("; ");
  return own.map((row) => `${row.workload || row.comm || "?"} (${remarks(row)})`).join(", ");
}

const excess = ({ used_bytes: used, quota: { soft_limit_bytes: soft } }) => (used > soft ? `${sizeText(used - soft)} more than the soft limit` : "");

/** Why a process uses more than its limit; empty if it doesn't. */
const uncounted = ({ used_bytes: used, limit_bytes: limit, overhead_bytes: overhead }) =>
  limit && overhead && used > limit ? `the limit doesn't count ${sizeText(overhead)} of overhead` : "";

const COLUMNS = [
  { title: "Quota", text: ({ name }) => name },
  { title: "Matches", text: (entry) => patterns(entry).map((pair) => pair.join("=")).join(", ") || "all" },
  { title: "Soft limit", text: amount("soft_limit"), number: true },
  { title: "Limit", text: amount("limit"), number: true },
  { title: "Reserve", text: amount("reserve"), number: true },
  { title: "Cgroup limit", text: amount("cgroup_limit"), number: true },
  { title: "Processes", text: users, long: true, update: (cell, entry) => cell.classList.toggle("warn", users(entry).includes(" soft limit")) },
  { title: "Origin", text: ({ origin }) => origin },
];

const record = ({ name, origin, quota }) => ({ name, origin, ...quota, match: JSON.stringify(quota.match ?? {}) });
const NONE = "No quota is set. A quota limits the memory of matching processes, or reserves memory for them.";
let section;

async function load() {
  const answer = await read("api/v1/quotas");
  if (answer.ok) section.show(await answer.json());
}

addView("quotas", () => (section = createListing("Quotas", COLUMNS, ({ name }) => name, record, NONE)), load);
