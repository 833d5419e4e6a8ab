// The list of the silences that have not ended.

import { $, button, make, name, put, sync } from "./elements.js";
import { clean, clock } from "./format.js";
import { attempt } from "./session.js";
import { callerText, changed, state } from "./state.js";
import { refresh } from "./live.js";
import { isOpen, keepFocus, requestScript } from "./views.js";

/** Opens the form for the alerts with some of the labels of this one. */
export const silence = async (alert) => (await requestScript("forms")).$forms.silence(alert);

/** The matchers of a silence, as one text. */
export const matchersOf = ({ matchers }) => matchers.map(matcher).join(" ");
export const matcher = (each) => `${each.name}${each.operator}${each.value}`;

/** Ends a silence. */
export async function expire(id) {
  const answer = await attempt("DELETE", `silences/${encodeURIComponent(id)}`);
  put($("silences-refused"), answer?.detail ?? "");
  if (answer?.ok) {
    state.frame.silences = state.frame.silences.filter((each) => each.id !== id);
    for (const alert of state.frame.alerts) alert.silenced_by = alert.silenced_by.filter((each) => each !== id);
    changed();
    keepFocus("#silences button");
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
      name(node.children[2], `${callerText(each.author)}: ${each.reason}`, 200);
    },
  );
  $("silenced").hidden = !silences.length || !isOpen("alerts");
}
