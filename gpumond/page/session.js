// The token that changes require, and requests that change something.

import * as address from "./address.js";
import { $, put, saveBlob } from "./elements.js";
import { drawing, state } from "./state.js";
import { requestScript } from "./views.js";

const STORED = "gpumond-token";
let token = sessionStorage.getItem(STORED) ?? "";
export const currentToken = () => token;

export function setToken(value) {
  token = value;
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
  put($("sign"), value ? "Sign out" : "Sign in");
}

/** Asks for a token, in the dialog that is open if there is one. False if it was cancelled. */
const signIn = async (refusal) => (await requestScript("forms")).$forms.signIn(refusal);

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
  const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
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
