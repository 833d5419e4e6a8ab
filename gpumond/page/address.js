// What the part of the address after # states: the view that a link restores, and a code that signs in.

const parameters = new URLSearchParams(location.hash.slice(1));

export const read = (name) => parameters.get(name) ?? "";

/** Writes a value into the address, or removes it if it is empty. `step`: the browser's Back returns to what was before. */
export function write(name, value, step = false) {
  if (value) parameters.set(name, value);
  else parameters.delete(name);
  const text = parameters.toString();
  history[step ? "pushState" : "replaceState"](null, "", location.pathname + location.search + (text && `#${text}`));
}

/** A link to another view of the web UI. */
export const linkTo = (values) => `#${new URLSearchParams(values)}`;

addEventListener("hashchange", () => location.reload()); // by a link or by the user: a write causes no such event
