// The token that changes require, and requests that change something.

import * as address from "./address.js";
import { $, put, saveBlob } from "./elements.js";
import { drawing, state } from "./state.js";

const STORED = "gpumond-token";
const LOCAL = ["localhost", "127.0.0.1", "[::1]"];
let token = sessionStorage.getItem(STORED) ?? "";
export const currentToken = () => token;

export function setToken(value) {
  token = value;
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
  put($("sign"), value ? "Sign out" : "Sign in");
}

/** What precedes a command on the daemon's machine if its runtime directory isn't a default one. */
async function runtimeVariable() {
  if (!LOCAL.includes(location.hostname)) return "";
  const directory = await fetch("api/v1/status").then((answer) => answer.json()).then((status) => status.runtime_dir, () => null);
  if (!directory) return "";
  const quoted = /^[\w@%+=:,./-]+$/.test(directory) ? directory : `'${directory.replaceAll("'", "'\\''")}'`;
  return `GPUMOND_RUNTIME_DIR=${quoted} `;
}

/** Asks for a token, in the dialog that is open if there is one. False if it was cancelled. */
function signIn(refusal = "") {
  const form = $("sign-form");
  const dialog = document.querySelector("dialog[open]") ?? $("signing");
  dialog.append(form);
  for (const node of dialog.children) node.inert = node !== form;
  put($("refused"), refusal);
  const command = `gpumond open --url ${location.origin}${location.pathname}`.replace(/\/$/, "");
  put($("sign-command"), command);
  runtimeVariable().then((variable) => put($("sign-command"), variable + command));
  $("token").value = "";
  if (!dialog.open) dialog.showModal();
  $("token").focus();
  return new Promise((resolve) => {
    const end = (given) => {
      for (const node of dialog.children) node.inert = false;
      $("signing").append(form);
      $("signing").close();
      resolve(given);
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      setToken($("token").value.trim());
      $("token").value = "";
      end(true);
    };
    $("sign-cancel").onclick = () => end(false);
    dialog.addEventListener("close", () => end(false), { once: true });
  });
}

export const post = (path, body) => change("POST", path, body);

/** Sends a change with the token, and asks for another token while the daemon refuses it. Null if cancelled. */
export async function change(method, path, body, own = {}) {
  let refusal = "";
  for (;;) {
    if ((!token || refusal) && !(await signIn(refusal))) return null;
    const headers = { ...own, "Content-Type": "application/json", Authorization: `Bearer ${token}` };
    const answer = await fetch(path, { method, headers, body: JSON.stringify(body) });
    const content = answer.status === 204 ? {} : await answer.json();
    if (answer.status !== 401) return { ok: answer.ok, ...content };
    setToken("");
    refusal = "The daemon didn't accept that token.";
  }
}

const UNANSWERED = { ok: false, detail: "The daemon doesn't respond." };

/** A change whose failure is an answer, too. Null if cancelled. */
export const attempt = (method, route, body, headers) =>
  change(method, `api/v1/${route}`, body, headers).catch(() => UNANSWERED);

/** POSTs a question, which requires no token, with the token if there is one. */
export async function ask(path, body) {
  const authorization = token ? { Authorization: `Bearer ${token}` } : {};
  const headers = { "Content-Type": "application/json", ...authorization };
  try {
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    return { ok: answer.ok, ...(await answer.json()) };
  } catch {
    return UNANSWERED;
  }
}

/** GETs a file with the token and saves it. Returns the daemon's refusal, or an empty text. */
export async function save(path, name) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` } });
  if (!answer.ok) return (await answer.json()).detail;
  saveBlob(name, await answer.blob());
  return "";
}

/** Signs in with the code in the page's address, which `gpumond open` wrote there, after the first frame: the daemon
imports most of its API at the first change. */
async function signInByCode() {
  const code = address.read("code");
  if (!code) return;
  address.write("code", "");
  if (!state.frame && !document.hidden) await new Promise((resolve) => drawing.addEventListener("change", resolve, { once: true }));
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ code }) };
  const answer = await fetch("api/v1/sessions", options);
  const content = await answer.json();
  if (answer.ok) setToken(content.token);
  else await signIn(content.detail);
}

$("sign").addEventListener("click", () => (token ? setToken("") : signIn()));
setToken(token);
signInByCode().catch(() => {}); // the daemon does not answer, which a notice shows
