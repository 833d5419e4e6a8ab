// Silences: the form for a new one, and the list of those that have not ended.

import { $, button, make, name, put, sync } from "./elements.js";
import { clean, clock } from "./format.js";
import { attempt } from "./session.js";
import { changed, state } from "./state.js";
import { refresh } from "./live.js";
import { isOpen } from "./views.js";

const NAMES = ["workload", "engine"]; // a silence is of the rule and one of these, else of the process or the device, unless the user changes it

let given = []; // the matchers that the form offers
let silenced = null; // the alert that the form is about

/** Opens the form for the alerts with some of the labels of this one. */
export function silence(alert) {
  silenced = alert;
  const labels = Object.entries(alert.labels).filter(([label, text]) => label !== "alertname" && text);
  given = [["rule", alert.rule], ...labels].map(([label, value]) => ({ name: label, operator: "=", value }));
  const subject = [...NAMES, "pid", "uuid"].find((label) => given.some((each) => each.name === label));
  put($("silence-title"), `Silence ${clean(alert.rule, 80)}`);
  put($("silence-refused"), "");
  $("silence-matchers").replaceChildren(
    ...given.map((each) => {
      const box = make("input");
      box.type = "checkbox";
      box.checked = ["rule", subject].includes(each.name);
      const text = make("bdi");
      name(text, matcher(each), 120);
      return make("label", box, " ", text);
    }),
  );
  $("silence-reason").value = "";
  $("silence").showModal();
}

/** The matchers of a silence, as one text. */
export const matchersOf = ({ matchers }) => matchers.map(matcher).join(" ");
const matcher = (each) => `${each.name}${each.operator}${each.value}`;

async function submit() {
  const boxes = [...$("silence-matchers").querySelectorAll("input")];
  const matchers = given.filter((_, place) => boxes[place].checked);
  const body = { matchers, for_seconds: Number($("silence-for").value), reason: $("silence-reason").value };
  const answer = await attempt("POST", "silences", body);
  if (!answer) return;
  put($("silence-refused"), answer.detail ?? "");
  if (!answer.ok) return;
  $("silence").close();
  state.frame.silences.push(answer.silence);
  silenced.silenced_by.push(answer.silence.id);
  changed();
  refresh();
}

/** Ends a silence. */
export async function expire(id) {
  const answer = await attempt("DELETE", `silences/${encodeURIComponent(id)}`);
  put($("silences-refused"), answer?.detail ?? "");
  if (answer?.ok) {
    state.frame.silences = state.frame.silences.filter((each) => each.id !== id);
    for (const alert of state.frame.alerts) alert.silenced_by = alert.silenced_by.filter((each) => each !== id);
    changed();
  }
  refresh();
}

export function showSilences() {
  const { silences, snapshot } = state.frame;
  const now = snapshot.taken_at;
  sync(
    $("silences"),
    silences,
    (each) => each.id,
    (each) => {
      const end = button("End", () => expire(each.id));
      end.setAttribute("aria-label", `End the silence for ${clean(matchersOf(each), 120)}`);
      return make("li", make("b"), make("time"), make("bdi"), end);
    },
    (node, each) => {
      const from = each.starts_at > now ? `from ${clock(each.starts_at, now)} ` : "";
      name(node.children[0], matchersOf(each), 200);
      put(node.children[1], `${from}until ${clock(each.ends_at, now)}`);
      name(node.children[2], `${each.author}: ${each.reason}`, 200);
    },
  );
  $("silenced").hidden = !silences.length || !isOpen("alerts");
}

$("silence")
  .querySelector("form")
  .addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
$("silence-cancel").addEventListener("click", () => $("silence").close());
