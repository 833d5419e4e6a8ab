// Frames and events from the daemon. Of all windows of a browser with the same daemon, one reads the stream and sends
// its messages to the others, because a browser opens at most six connections to an address. Windows that share nothing
// request frames instead.

import { applyChanges, readMessages } from "./messages.js";
import { currentToken, setToken } from "./session.js";
import { addEvents, drawSoon, setFrame, state } from "./state.js";

const PAUSE = 1000;
const TIMEOUT = 5000; // the daemon sends at least a comment every 2 s
const SILENCE = 8000; // after this time without a message, a window requests frames itself

const NAME = `gpumond ${new URL(".", document.baseURI).pathname}`;
const channel = new BroadcastChannel(NAME);

let etag = null;
let number = 0; // of the newest message of the stream; -1 if this window's frame is not from the stream
let leaving = new AbortController(); // aborted when this window is hidden, or changes its part
let early = earlyStream; // requested before it is known whether this window leads
let leading = false;
let followed = false; // true once another window has asked for messages: to copy a frame for nobody takes time
let timer = 0;
let watchdog = 0;

/** GET with a timeout; with the token if the daemon requires it for reading. */
export function read(path, headers = {}, timeout = TIMEOUT) {
  const token = state.closed && currentToken();
  const own = token ? { Authorization: `Bearer ${token}` } : {};
  return fetch(path, { headers: { ...headers, ...own }, cache: "no-store", signal: AbortSignal.timeout(timeout) });
}

/** Reads the stream until this window is hidden. */
async function follow() {
  const { signal } = leaving;
  while (!signal.aborted) {
    try {
      await readStream(signal);
    } catch (error) {
      if (signal.aborted) return;
      await failed(error);
    }
    if (signal.aborted) return;
    send();
    drawSoon();
    if (state.closed) return join();
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

/** Ends the stream that was requested early, if nothing reads it. */
function withdraw() {
  early?.ending.abort();
  early = null;
}

async function readStream(signal) {
  const { ending, answer: coming } = early ?? openStream();
  early = null;
  const end = () => ending.abort(signal.reason);
  let silence = 0;
  const alive = () => {
    clearTimeout(silence);
    silence = setTimeout(() => ending.abort(new DOMException("The daemon doesn't respond.", "TimeoutError")), TIMEOUT);
  };
  signal.addEventListener("abort", end);
  try {
    alive();
    const answer = await coming;
    if (!answer.ok) return refused(answer.status, await answer.json());
    await readMessages(answer.body, (kind, content) => {
      alive();
      if (!kind) return send();
      number += 1;
      const message = kind === "frame" ? { frame: content } : { changes: content };
      show(message);
      Object.assign(state, { failures: 0, cause: null, problem: null });
      send(message);
      drawSoon();
    });
  } finally {
    clearTimeout(silence);
    signal.removeEventListener("abort", end);
  }
}

function show({ frame, changes }) {
  const { events } = frame ?? changes;
  if (changes) applyChanges(state.frame, changes);
  setFrame(frame ?? state.frame);
  addEvents(events);
}

async function failed(error) {
  const connected = error.name === "TimeoutError" && (await reachable());
  state.failures += 1;
  state.cause = connected ? "connections" : "unreachable";
}

function refused(status, problem, sentToken = "") {
  if ((status === 429 || status === 503) && state.frame) {
    state.failures += 1;
    state.cause = problem;
    return;
  }
  setFrame(null);
  etag = null;
  Object.assign(state, { failures: 0, cause: null, problem });
  if (status === 401) {
    if (sentToken && sentToken === currentToken()) setToken(""); // a token given after the request is not refused
    state.closed = true;
  }
}

/** Requests a frame each second until this window is hidden. */
async function poll() {
  const { signal } = leaving;
  withdraw();
  clearTimeout(timer);
  number = -1;
  await request();
  if (signal.aborted) return;
  drawSoon();
  clearTimeout(timer);
  timer = setTimeout(poll, PAUSE);
}

async function request() {
  const tokenBefore = state.closed ? currentToken() : "";
  try {
    const answer = await read("api/v1/frame", etag ? { "If-None-Match": etag } : {});
    if (answer.status === 200) {
      setFrame(await answer.json());
      etag = answer.headers.get("ETag");
      await requestEvents();
    } else if (answer.status !== 304) {
      refused(answer.status, await answer.json(), tokenBefore);
      return;
    }
    Object.assign(state, { failures: 0, cause: null, problem: null });
  } catch (error) {
    await failed(error);
  }
}

/** Events since the last one known. Missing events do not withdraw the frame: the next request has them. */
async function requestEvents() {
  const last = Math.max(0, ...state.events.keys());
  const answer = await read("api/v1/events", { Accept: "application/json", "Last-Event-ID": String(last) });
  if (answer.ok) addEvents(await answer.json());
}

/** True if the daemon accepts a connection although a request had no response: then the request was never sent.

Browsers do not count WebSockets among the connections of requests. The daemon refuses this one, which is an answer. */
function reachable() {
  const address = new URL("-/healthy", document.baseURI);
  address.protocol = address.protocol.replace("http", "ws");
  return new Promise((resolve) => {
    const socket = new WebSocket(address);
    const end = (answered) => {
      resolve(answered);
      socket.close();
    };
    socket.onopen = socket.onerror = () => end(true);
    setTimeout(end, TIMEOUT / 2, false);
  });
}

function send(message = {}) {
  if (!followed) return;
  const { failures, cause, problem, closed } = state;
  channel.postMessage({ ...(closed ? {} : message), number, state: { failures, cause, problem, closed } });
}

channel.addEventListener("message", ({ data }) => {
  if (data === "who") {
    channel.postMessage("hello");
    return;
  }
  if (data === "hello") {
    followed = true;
    if (leading && state.frame) send({ frame: { ...state.frame, events: [...state.events.values()] } });
    return;
  }
  if (leading || state.closed || state.paused || document.hidden) return;
  withdraw();
  clearTimeout(timer);
  watch();
  if (data.state.closed) {
    state.closed = true;
    join();
    return;
  }
  Object.assign(state, data.state);
  if (data.frame || (data.changes && data.number === number + 1)) {
    show(data);
    number = data.number;
  } else if (data.number !== number) {
    channel.postMessage("hello");
  }
  if (data.state.problem) setFrame(null);
  drawSoon();
});

/** The leading window may be suspended: a window that receives no message requests frames itself. */
function watch() {
  clearTimeout(watchdog);
  watchdog = setTimeout(poll, SILENCE);
}

/** Leads if no other window does, and receives messages otherwise. Windows share nothing if they may have different
tokens, or if the browser has no locks (plain HTTP to another host). */
function join() {
  disconnect();
  if (document.hidden || state.paused) {
    withdraw();
    return;
  }
  state.receivedAt = performance.now();
  const { signal } = leaving;
  if (state.closed || !navigator.locks) {
    poll();
    return;
  }
  const lead = () => {
    if (signal.aborted) return undefined;
    clearTimeout(watchdog);
    clearTimeout(timer);
    leading = true;
    channel.postMessage("who");
    follow();
    return new Promise((resolve) => signal.addEventListener("abort", resolve));
  };
  navigator.locks.request(NAME, { signal }, lead).catch(() => {}); // aborted: this window was hidden before it led
  channel.postMessage("hello");
  watch();
}

function disconnect() {
  leaving.abort();
  leaving = new AbortController();
  leading = false;
  clearTimeout(timer);
  clearTimeout(watchdog);
}

/** Keeps the frame that is shown, as a hidden window does, or continues. */
export function setPaused(paused) {
  state.paused = paused;
  join();
}

/** Requests a frame now, if this window requests frames. */
export function refresh() {
  if (!state.paused && (state.closed || !navigator.locks)) poll();
}

document.addEventListener("visibilitychange", join);
addEventListener("pagehide", disconnect);
addEventListener("pageshow", (event) => event.persisted && join());
join();
