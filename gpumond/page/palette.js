// The command palette: jumps to devices, programs and views, and actions, found by their words.

import { $, control, named, put } from "./elements.js";
import { clean } from "./format.js";
import { state } from "./state.js";
import { filterBy } from "./table.js";
import { openView, requestScript } from "./views.js";

const SHOWN = 50;
const ASKED = /^(?:(filter)( processes)?( by)?(?: |$))?(.*)/i; // what the user wants to filter, without the verb

let commands = []; // pairs of a text and an action
let coming = null; // the script with the commands, while it is requested
let found = [];
let active = 0; // place of the selected one

/** Shows the present state, and then something of it. */
export function visit(show) {
  openView("");
  show();
}

function search() {
  const [, verb, , , words] = ASKED.exec($("palette-text").value.trim());
  const terms = words.toLowerCase().split(/\s+/).filter(Boolean);
  const asked = terms.join(" ");
  const rank = (text) => (text === asked || text === `view ${asked}` ? 2 : text.startsWith(terms[0] ?? ""));
  const matching = commands.filter(([text]) => terms.every((term) => text.toLowerCase().includes(term)));
  found = matching.sort(([one], [other]) => rank(other.toLowerCase()) - rank(one.toLowerCase())).slice(0, SHOWN);
  if (words && (verb || !found.length) && state.frame) found.unshift([`Filter processes by ${words}`, () => visit(() => filterBy(words))]);
  $("palette-list").replaceChildren(
    ...found.map(([text, act], place) => {
      const option = control("li", { role: "option", id: `command-${place}` }, named(text, 200));
      option.addEventListener("click", () => run(act));
      return option;
    }),
  );
  put($("palette-count"), found.length || !commands.length ? "" : "No matching command.");
  select(0);
}

function select(place) {
  active = Math.max(0, Math.min(place, found.length - 1));
  [...$("palette-list").children].forEach((option, at) => (option.ariaSelected = String(at === active)));
  $("palette-list").children[active]?.scrollIntoView({ block: "nearest" });
  $("palette-text").setAttribute("aria-activedescendant", found.length ? `command-${active}` : "");
}

function run(act) {
  $("palette").close();
  act();
}

const KEYS = {
  ArrowDown: () => select(active + 1),
  ArrowUp: () => select(active - 1),
  Home: () => select(0),
  End: () => select(found.length - 1),
  Enter: () => found.length && run(found[active][1]),
};

function create() {
  const text = control("input", { type: "text", role: "combobox", id: "palette-text", autocomplete: "off", spellcheck: false, ariaLabel: "Command", ariaExpanded: "true", ariaAutoComplete: "list" });
  text.setAttribute("aria-controls", "palette-list");
  const list = control("ul", { role: "listbox", id: "palette-list", ariaLabel: "Commands" });
  const count = control("p", { role: "status", id: "palette-count" });
  const dialog = control("dialog", { id: "palette", ariaLabel: "Commands" }, text, list, count);
  text.addEventListener("input", search);
  text.addEventListener("keydown", async (event) => {
    if (!KEYS[event.key]) return;
    event.preventDefault();
    await coming;
    KEYS[event.key]();
  });
  document.body.append(dialog);
}

async function load() {
  const { $forms } = await requestScript("forms");
  commands = [...$forms.commandsOf()].map(([text, act]) => [clean(text, 200), act]);
  search();
}

function open() {
  if (document.querySelector("dialog[open]")) return;
  if (!$("palette")) create();
  commands = [];
  $("palette-text").value = "";
  $("palette").showModal();
  search();
  coming = load().catch(() => put($("palette-count"), "The commands can’t be loaded. Reload the page."));
}

$("palette-open").addEventListener("click", open);
document.addEventListener("keydown", (event) => {
  const chord = event.key === "k" && (event.ctrlKey || event.metaKey) && !event.altKey;
  const colon = event.key === ":" && !event.target.closest("input, select, textarea, dialog");
  if (!chord && !colon) return;
  event.preventDefault();
  open();
});
