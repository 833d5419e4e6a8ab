// The form for a new silence.

import { button, choice, control, labeled, make, name, put } from "./elements.js";
import { clean } from "./format.js";
import { refresh } from "./live.js";
import { attempt } from "./session.js";
import { matcher } from "./silences.js";
import { changed, state } from "./state.js";
import { keepFocus } from "./views.js";

const NAMES = ["workload", "engine"]; // a silence is of the rule and one of these, else of the process or the device, unless the user changes it
const LENGTHS = [["3600", "1 h"], ["14400", "4 h"], ["86400", "1 d"], ["604800", "7 d"]];

const title = control("h2", { id: "silence-title" });
const matchers = control("div", { id: "silence-matchers" });
const length = choice(LENGTHS);
const reason = control("input", { type: "text", id: "silence-reason", maxLength: 512, autocomplete: "off", required: true, autofocus: true });
const refused = control("p", { role: "alert", id: "silence-refused" });
const buttons = make("div.buttons", button("Cancel", () => dialog.close()), control("button", { type: "submit", className: "strong" }, "Silence"));
const form = make(
  "form",
  title,
  make("p", "Alerts with all ticked labels are still shown, but not sent to receivers."),
  make("fieldset", make("legend", "Labels"), matchers),
  make("p", labeled("Duration", length)),
  make("p", labeled("Reason (required)", reason)),
  refused,
  buttons,
);
const dialog = control("dialog", { id: "silence" }, form);
dialog.setAttribute("aria-labelledby", "silence-title");
document.body.append(dialog);

let given = []; // the matchers that the form offers
let silenced = null; // the alert that the form is about

/** Opens the form for the alerts with some of the labels of this one. */
export function silence(alert) {
  silenced = alert;
  const labels = Object.entries(alert.labels).filter(([label, text]) => label !== "alertname" && text);
  given = [["rule", alert.rule], ...labels].map(([label, value]) => ({ name: label, operator: "=", value }));
  const subject = [...NAMES, "pid", "uuid"].find((label) => given.some((each) => each.name === label));
  put(title, `Silence ${clean(alert.rule, 80)}`);
  put(refused, "");
  matchers.replaceChildren(
    ...given.map((each) => {
      const box = control("input", { type: "checkbox", checked: ["rule", subject].includes(each.name) });
      const text = make("bdi");
      name(text, matcher(each), 120);
      return make("label", box, " ", text);
    }),
  );
  reason.value = "";
  dialog.showModal();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const boxes = [...matchers.querySelectorAll("input")];
  const body = { matchers: given.filter((_, place) => boxes[place].checked), for_seconds: Number(length.value), reason: reason.value };
  const answer = await attempt("POST", "silences", body);
  if (!answer) return;
  put(refused, answer.detail ?? "");
  if (!answer.ok) return;
  dialog.close();
  const { silences } = state.frame;
  if (!silences.some(({ id }) => id === answer.silence.id)) silences.push(answer.silence); // a frame may be earlier than the answer
  silenced.silenced_by.push(answer.silence.id);
  changed();
  keepFocus("#silences-open, #silences li:last-child button");
  refresh();
});
