// Views besides the present state, such as rules and receipts. The address contains the one that is open.

import * as address from "./address.js";
import { $, button, make, sync, visible } from "./elements.js";
import { changed } from "./state.js";

const FORMS = ["rules", "baselines"]; // views of forms.js
const PAUSE = 5000; // between requests of the open view

/** Titles of the views by name. */
export const TITLES = { "": "Overview", alerts: "Alerts", rules: "Rules", cases: "Cases", receipts: "Receipts", queue: "Queue", quotas: "Quotas", compare: "Compare", baselines: "Baselines" };

const loading = make("p.quiet", "Loading…");
const views = {}; // those besides the present state, by name
let open = Object.hasOwn(TITLES, address.read("view")) ? address.read("view") : "";
let due = 0; // performance.now() of the next request
let coming = null; // the script with the open view, while it is requested

/** `create` returns the view's element; `load` requests what it shows, when it opens and every five seconds. */
export function addView(name, create, load) {
  views[name] = { create, load };
}

export function openView(name) {
  address.write("view", name, name !== open);
  if (name !== open) {
    for (const own of ["case", "moment", "until"]) address.write(own, ""); // of one view
    document.activeElement.blur(); // a key would act on what is no longer open
  }
  open = name;
  reload();
  keepFocus();
}

const CURRENT = "#views [aria-current=page]";
/** Moves the focus, if what had it is gone, to the first visible element with a selector, or to the open view's name. */
export function keepFocus(selector = CURRENT) {
  if (document.activeElement !== document.body && document.activeElement.checkVisibility()) return;
  (visible(selector) ?? visible(CURRENT))?.focus();
}

export const isOpen = (name) => open === name;

/** Shows the open view, and requests again what it shows. */
export function reload() {
  due = 0;
  changed();
}

/** Shows the open view, unless there is no frame. True if it is the present state. */
export function showViews(hidden) {
  $("content").hidden = hidden || open !== "";
  $("view").hidden = hidden || open === "";
  sync(
    $("views"),
    Object.keys(TITLES),
    (name) => name,
    (name) => button(TITLES[name], () => openView(name), "button.plain"),
    (node, name) => node.setAttribute("aria-current", name === open ? "page" : "false"),
  );
  if (open && !hidden) {
    if (views[open]) showView(views[open]);
    else {
      if (missing.hidden) showOnly(loading);
      coming ??= requestViews().finally(() => (coming = null));
    }
  }
  return !open;
}

const missing = make("p.quiet", "This view can’t be loaded: the daemon may have been updated. Reload the page.");
missing.hidden = true;
$("view").append(loading, missing);

/** Requests `lazyviews` or `forms`. */
export const requestScript = (name) => import(`./${document.querySelector("[data-lazyviews]").dataset[name]}`);

/** Opens the dialog of what a program's memory consists of. */
export const why = async (pid, subject) => (await requestScript("lazyviews")).$lazyviews.why(pid, subject);

async function requestViews() {
  try {
    await requestScript(FORMS.includes(open) ? "forms" : "lazyviews");
    changed();
  } catch {
    showOnly(missing);
  }
}

function showOnly(...shown) {
  for (const node of $("view").children) node.hidden = !shown.includes(node);
}

function showView(view) {
  if (!view.node) $("view").append((view.node = view.create()), loading);
  showOnly(view.node, view.loaded || loading);
  if (performance.now() < due) return;
  due = performance.now() + PAUSE;
  view.load().then(
    () => {
      view.loaded = true;
      if (views[open] === view) loading.hidden = true;
    },
    () => {}, // a notice says that the daemon does not answer
  );
}
