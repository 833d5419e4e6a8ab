// The web UI: draws the latest frame. Each number is from that frame, except in charts, events and receipts.

// The stream is first: the browser answers while the other modules are evaluated.
import { setPaused } from "./live.js";

import { showDevices } from "./devices.js";
import { $, name, put, visible } from "./elements.js";
import { showEngines } from "./engines.js";
import { showEvents } from "./events.js";
import { clock, duration } from "./format.js";
import { showHero } from "./shareschart.js";
import { showNotices } from "./notices.js";
import "./palette.js";
import { showProblems } from "./problems.js";
import { showSilences } from "./silences.js";
import { drawing, state } from "./state.js";
import { showProcesses } from "./table.js";
import "./theme.js";
import "./toolbar.js";
import { openView, requestScript, showViews } from "./views.js";

function show() {
  const { frame, failures } = state;
  showNotices();
  const present = showViews(!frame);
  $("content").parentNode.classList.toggle("old", failures > 0);
  if (!frame) {
    document.title = `gpumond ${location.host}`;
    put($("moment"), "");
    return;
  }
  const { seq, elapsed_seconds } = frame.snapshot;
  showMoment();
  name($("host"), frame.host, 80);
  put($("version"), `gpumond ${frame.version}${failures ? "" : `, up for ${duration(elapsed_seconds)}`}`);
  showProblems();
  showSilences();
  if (present) showPresent();
  document.documentElement.dataset.seq = String(seq);
}

/** The browser's time zone. Intl, which knows its name, takes a tenth of the time to the first picture. */
function zone() {
  const east = -new Date().getTimezoneOffset();
  const minutes = Math.abs(east);
  const more = minutes % 60 ? `:${minutes % 60}` : "";
  return `UTC${east ? `${east < 0 ? "-" : "+"}${Math.floor(minutes / 60)}${more}` : ""}`;
}

function showMoment() {
  const { taken_at, source } = state.frame.snapshot;
  const { driver_version: version, name: of } = source;
  const driver = version && !version.startsWith(of) && `driver ${version}`; // a simulation's version isn't a driver's
  const paused = state.paused && `paused ${duration((performance.now() - state.receivedAt) / 1000)} ago`;
  put($("moment"), [`${state.failures ? "no response since " : ""}${clock(taken_at)} (${zone()})`, driver, paused].filter(Boolean).join(" · "));
}

async function showStory() {
  if (state.frame.snapshot.source.name !== "sim") return;
  const caption = (await requestScript("forms")).$forms.caption(state.frame);
  $("caption").hidden = !caption;
  put($("caption").lastElementChild, caption);
}

function showPresent() {
  showStory();
  showHero();
  showDevices();
  showEngines();
  showProcesses();
  showEvents();
}

function pause() {
  setPaused(!state.paused);
  put($("pause"), state.paused ? "Resume" : "Pause");
  show();
}

put($("host"), location.host);
$("pause").addEventListener("click", pause);
$("help-open").addEventListener("click", () => requestScript("lazyviews").then(() => $("help-open").click()), { once: true });
const KEYS = { a: () => openView("alerts"), c: () => openView("compare"), m: () => $("moment-at")?.focus(), p: pause, "/": () => visible("[type=search]")?.focus(), "?": () => $("help-open").click() };
addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!KEYS[event.key] || event.target.closest("input, select, textarea, dialog")) return;
  event.preventDefault(); // a field that gets the focus would get the key
  KEYS[event.key]();
});
drawing.addEventListener("change", show);
setInterval(() => state.paused && $("moment").textContent && showMoment(), 1000);
