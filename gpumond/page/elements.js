// Elements of the document. Text from programs enters it through textContent only.

import { clean } from "./format.js";

export const $ = (id) => document.getElementById(id);

/** An element from `name.class`. Children are elements or text. */
export function make(kind, ...children) {
  const [name, ...classes] = kind.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  node.append(...children);
  return node;
}

export function svg(kind, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

const AMOUNTS = /(\d[\d.]* (?:[BWdhs]|[KMGT]iB|min|°C)(?!\w)|GPU \d+)/; // no line ends in one

/** Sets the text of `node`, which nothing else sets. Equal text is not set again: a screen reader would repeat it. */
export function put(node, text, most = 1000) {
  if (node.given === text) return;
  node.given = text;
  const safe = clean(text, most);
  if (node.textContent === safe) return;
  const parts = safe.split(AMOUNTS);
  if (parts.length === 1 || parts.join("") === parts[1]) node.textContent = safe;
  else node.replaceChildren(...parts.map((part, place) => (place % 2 ? make("data", part) : part)));
}

/** Sets a text that may be cut; the tooltip has more of it. */
export function name(node, text, most = 300) {
  if (node.given === text) return;
  put(node, text, most);
  node.title = clean(text, 1000);
}

/** Colors an element by the level of a card. */
export function colored(node, level) {
  for (const each of ["bad", "warn"]) node.classList.toggle(each, each === level);
}

/** A name from a program, isolated so that its direction does not reorder the text around it. */
export function named(text, most = 300) {
  const node = make("bdi");
  name(node, text, most);
  return node;
}

export function button(text, act, kind = "button") {
  const node = make(kind, text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

/** An element with properties and attributes, such as an input. */
export function control(kind, { role, ...properties }, ...children) {
  const node = Object.assign(make(kind, ...children), properties);
  if (role) node.setAttribute("role", role);
  return node;
}

const option = ([value, text = value]) => control("option", { value }, text);

/** A choice of values, each with its text. */
export const choice = (pairs, properties = {}) => control("select", properties, ...pairs.map(option));

export const labeled = (text, node) => make("label", `${text} `, node);

/** The first visible element with a selector. */
export const visible = (selector, parent = document) => [...parent.querySelectorAll(selector)].find((node) => node.checkVisibility());

/** Makes the children of `parent` those of `items`. A child is kept by its key from call to call. The focus of one that is
removed goes to the first that can have it.

`fixed`: how many children precede them. */
export function sync(parent, items, key, create, update, fixed = 0) {
  const before = parent.kept ?? new Map();
  const focus = document.activeElement;
  const fresh = new Map(items.map((item) => [key(item), item]));
  for (const [known, node] of before) if (!fresh.has(known)) node.remove();
  parent.kept = new Map();
  [...fresh].forEach(([known, item], place) => {
    const node = before.get(known) ?? create(item);
    if (parent.children[fixed + place] !== node) parent.insertBefore(node, parent.children[fixed + place] ?? null);
    update(node, item);
    parent.kept.set(known, node);
  });
  if (!focus) return;
  const kept = focus.isConnected ? focus : visible("button, a", parent);
  if (document.activeElement !== kept) kept?.focus({ preventScroll: true });
}

/** Makes the options of a choice those of `pairs`, and chooses one. */
export function showChoices(select, pairs, value) {
  sync(select, pairs, ([each]) => each, option, (node, [each, text = each]) => put(node, text));
  if (select.value !== value) select.value = value;
}

export const saveJson = (name, value) =>
  saveBlob(`gpumond-${name}.json`, new Blob([`${JSON.stringify(value, null, 2)}\n`], { type: "application/json" }));

/** Saves a blob as a file of the browser's user. */
export function saveBlob(name, blob) {
  const link = make("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
