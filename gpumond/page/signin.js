// The form for a token, in a dialog of its own or in the one that is open.

import { button, control, labeled, make, put } from "./elements.js";
import { capital } from "./format.js";
import { setToken } from "./session.js";

const LOCAL = ["localhost", "127.0.0.1", "[::1]"];

const command = make("code");
const token = control("input", { type: "password", id: "token", autocomplete: "off", required: true });
const refused = control("p", { id: "refused", role: "alert" });
const cancel = button("Cancel", () => {});
const submit = control("button", { type: "submit", className: "strong" }, "Sign in");
const about = make(
  "p",
  "You need a token to change anything. The daemon writes one for its user to the file ",
  make("code", "token"),
  " in its runtime directory; for a systemd service, that is ",
  make("code", "/run/gpumond-api/token"),
  ". This command opens the web UI with you signed in: ",
  command,
);
const kept = make("p.quiet", "The token is kept until you close this tab.");
const form = control("form", { ariaLabel: "Sign in" }, make("h2", "Sign in"), about, make("p", labeled("Token", token)), refused, kept, make("div.buttons", cancel, submit));
form.id = "sign-form";
const own = control("dialog", { ariaLabel: "Sign in" }, form);
document.body.append(own);

/** What precedes a command on the daemon's machine if its runtime directory isn't a default one. */
async function runtimeVariable() {
  if (!LOCAL.includes(location.hostname)) return "";
  const directory = await fetch("api/v1/status").then((answer) => answer.json()).then((status) => status.runtime_dir, () => null);
  if (!directory) return "";
  const quoted = /^[\w@%+=:,./-]+$/.test(directory) ? directory : `'${directory.replaceAll("'", "'\\''")}'`;
  return `GPUMOND_RUNTIME_DIR=${quoted} `;
}

/** Why the daemon doesn't accept a token; empty if it does. A token that may not have a session is accepted, too. */
async function refusalOf(value) {
  try {
    const answer = await fetch("api/v1/sessions/code", { method: "POST", headers: { Authorization: `Bearer ${value}` } });
    return answer.ok || answer.status === 403 ? "" : (await answer.json()).detail;
  } catch {
    return "The daemon doesn't respond.";
  }
}

/** Asks for a token, in the dialog that is open if there is one, until the daemon accepts one. False if it was cancelled. */
export function signIn(refusal = "") {
  const dialog = document.querySelector("dialog[open]") ?? own;
  dialog.append(form);
  for (const node of dialog.children) node.inert = node !== form;
  put(refused, refusal);
  const text = `gpumond open --url ${location.origin}${location.pathname}`.replace(/\/$/, "");
  put(command, text);
  runtimeVariable().then((variable) => put(command, variable + text));
  if (!dialog.open) dialog.showModal();
  token.focus();
  return new Promise((resolve) => {
    const end = (given) => {
      for (const node of dialog.children) node.inert = false;
      form.onsubmit = null;
      token.value = "";
      own.append(form);
      own.close();
      resolve(given);
    };
    form.onsubmit = async (event) => {
      event.preventDefault();
      submit.disabled = true;
      const value = token.value.trim();
      const reason = await refusalOf(value);
      submit.disabled = false;
      if (!form.onsubmit) return undefined; // cancelled
      put(refused, capital(reason));
      if (reason) return token.select();
      setToken(value);
      return end(true);
    };
    cancel.onclick = () => end(false);
    dialog.addEventListener("close", () => end(false), { once: true });
  });
}
