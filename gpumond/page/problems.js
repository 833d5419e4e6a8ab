// Problems: a card for each alert and verdict, with what can be done about it.

import { linkTo } from "./address.js";
import { alertText, cardsOf, ceilingOf, ageOf, isEnded, leftOf, levelOf, lineOf, reasonsOf, remedyOf, restOf } from "./cards.js";
import { showSince } from "./chart.js";
import { $, button, make, name, put, svg, sync } from "./elements.js";
import { shapes } from "./evidenceshapes.js";
import { flush, suspend } from "./flushdialog.js";
import { clean, many } from "./format.js";
import { showDevice } from "./shareschart.js";
import { IDLE, rowsOf } from "./processlist.js";
import { refusalOf } from "./processrow.js";
import { choose, chosen } from "./selection.js";
import { silence } from "./silences.js";
import { usedPaths } from "./recentuse.js";
import { allowsFlush, hasPools, label, processKey, processOf, reclaimableOf, state } from "./state.js";
import { movedWithin, showProcess } from "./table.js";
import { isOpen, openView, requestScript, why } from "./views.js";
import { RUNBOOKS } from "./words.js";

const SHOWN = 24; // cards that are drawn; the view of alerts lists all
const WIDE = matchMedia("(min-width: 1240px)"); // as in page.css: three cards beside one another
const STEADY = 5000; // milliseconds after a movement of the pointer below the cards for which they keep their height
const MARGIN = 120; // seconds that a chart shows before a problem began

const rowOf = ({ uuid, process }) => process && processOf(uuid, process);

const runbookOf = ({ kind, alert }) => [kind, alert?.rule].find((each) => RUNBOOKS.includes(each));

function subjectOf({ uuid, process, alert }, row) {
  const device = state.devices.get(uuid);
  const program = row?.workload || row?.comm || alert?.labels.workload || alert?.labels.engine || (process && `pid ${process.pid}`);
  return [program, device && label(device)].filter(Boolean).join(" on ") || "this machine";
}

/** Shows the chart of the card's subject from the time before the problem began. */
function showChart({ uuid, process, alert, verdict }) {
  openView("");
  showSince((verdict?.since ?? alert.fired_at ?? alert.active_at) - MARGIN);
  const row = rowOf({ uuid, process });
  if (row) showProcess(row.key);
  else showDevice(state.devices.get(uuid));
}

function showEvidence(node) {
  const away = !isOpen("");
  if (away) openView("");
  if (isOfAnother(node)) choose(null);
  if (node.hidden) $("problems-all").click();
  node.lastChild.toggleAttribute("open", away || undefined);
  if (away) node.scrollIntoView({ block: "nearest" });
}

/** Actions of a card by their name. `of`: whether the card has it; `on`: whether it would do something now; `off`: why not.
What comes and goes with the verdict is the last. */
const ACTIONS = {
  Chart: { of: () => true, act: ({ card }) => showChart(card) },
  Flush: {
    of: ({ card, row }) => (row ? allowsFlush(row) : !card.process && state.devices.has(card.uuid) && state.frame.processes.some(allowsFlush)),
    on: ({ card, row }) => Boolean(row ? row.cached_bytes : reclaimableOf([state.devices.get(card.uuid)]).bytes > 0),
    off: ({ row, subject }) => (row ? refusalOf(row) : `${subject} has nothing to flush.`),
    act: ({ card, row, subject }) =>
      row ? flush({ pid: row.pid, start_ticks: row.start_ticks }, subject) : flush({ device: card.uuid }, subject),
  },
  Suspend: {
    of: ({ card, row }) => Boolean(card.kind === IDLE && row?.suspendable),
    on: ({ row }) => !state.frame.snapshot.suspended_programs.some((each) => processKey(each) === processKey(row)),
    off: ({ subject }) => `${subject} is suspended.`,
    act: ({ row, subject }) => suspend({ pid: row.pid }, subject),
  },
  Silence: { of: ({ card }) => card.alert && !card.alert.silenced_by.length, act: ({ card }) => silence(card.alert) },
  Why: { of: ({ row }) => Boolean(row && hasPools(row)), act: ({ row, subject }) => why(row.pid, subject) },
  Evidence: {
    of: ({ card: { verdict } }) => Boolean(verdict?.fit || verdict?.evidence?.length),
    act: showEvidence,
  },
};
const can = (node, { of, on }) => of(node) && (!on || on(node));

function createFit() {
  const node = make("details.fit", make("summary", "Evidence"));
  node.addEventListener("toggle", () => drawFit(node));
  return node;
}

async function drawFit(node) {
  if (node.open && !node.hidden) (await requestScript("forms")).$forms.drawFit(node);
}

function create() {
  const drawing = svg("svg", { class: "trend", viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const acts = make("div.acts");
  const node = make("li", make("div.what", make("b"), " ", make("bdi"), make("time")), drawing, make("p.line", make("strong"), " ", make("bdi")), acts, createFit());
  for (const [word, { act }] of Object.entries(ACTIONS)) acts.append(button(word, () => act(node), "button.plain"));
  acts.lastChild.before(make("a", "Runbook"), make("a", "Case"));
  return node;
}

function update(node, card) {
  const now = state.frame.snapshot.taken_at;
  const row = rowOf(card);
  const subject = subjectOf(card, row);
  Object.assign(node, { card, row, subject });
  node.className = `card ${levelOf(card, row)}`;
  const [kind, of, age] = node.firstChild.children;
  put(kind, card.kind);
  name(of, subject, 80);
  put(age, ageOf(card, now, state.frame.silences));
  age.title = clean(reasonsOf(card, state.frame.silences), 600);
  name(node.querySelector(".line bdi"), lineOf(card, row, now, subject), 600);
  node.querySelector(".line").title = clean(card.alert ? alertText(card.alert.notes) : card.verdict.summary, 600);
  put(node.querySelector("strong"), leftOf(card, subject));
  drawTrend(node.querySelector(".trend"), card, row);
  const buttons = node.querySelectorAll(".acts button");
  Object.entries(ACTIONS).forEach(([word, action], place) => {
    buttons[place].hidden = !action.of(node);
    buttons[place].disabled = !can(node, action);
    buttons[place].title = action.of(node) && buttons[place].disabled ? clean(action.off(node), 200) : "";
    buttons[place].ariaLabel = clean(`${word} ${card.kind} ${subject}`, 200);
  });
  const [runbook, oomCase] = node.querySelectorAll(".acts a");
  runbook.hidden = !runbookOf(card);
  runbook.href = `docs/runbooks/${encodeURIComponent(runbookOf(card))}`;
  runbook.ariaLabel = clean(`Runbook ${card.kind}`, 200);
  const id = card.alert?.notes.case; // of an out-of-memory error
  oomCase.hidden = !id;
  if (id) oomCase.href = linkTo({ view: "cases", case: id });
  const { verdict, process } = card;
  const remedy = remedyOf(card.kind, { pid: process?.pid, device: state.devices.get(card.uuid) });
  Object.assign(node.lastChild, { verdict, now, remedy, hidden: !verdict?.fit && !verdict?.evidence?.length });
  drawFit(node.lastChild);
}

/** Identity of an alert whose labels are an object. */
export const keyOf = ({ rule, active_at, pid, labels }) => JSON.stringify([rule, active_at, pid, labels]);

/** What the card of an active alert offers besides its chart: pairs of a word and an action. */
export function actsOf(alert) {
  const isOf = ({ card }) => card.alert && keyOf(card.alert) === keyOf(alert);
  const node = [...$("alerts").children].find(isOf);
  const own = Object.entries(ACTIONS).filter(([word, action]) => node && word !== "Chart" && can(node, action));
  return own.map(([word, { act }]) => [word, () => act(node)]);
}

/** What the cards offer, as commands: pairs of a text and an action. Rows and devices have the others. */
export const cardCommands = () =>
  [...$("alerts").children].flatMap((node) => {
    const own = Object.entries(ACTIONS).filter(([word, action]) => !["Flush", "Suspend"].includes(word) && can(node, action));
    const { card, subject } = node;
    const text = (word) => `${word} ${card.kind} (${subject})`;
    const links = [...node.querySelectorAll(".acts a:not([hidden])")];
    return [...own.map(([word, { act }]) => [text(word), () => act(node)]), ...links.map((link) => [text(link.textContent), () => link.click()])];
  });

/** Draws the fit of a card's verdict, or the used memory of its subject in the last 15 minutes, and what it can reach. */
function drawTrend(drawing, { uuid, process, verdict }, row) {
  const device = state.devices.get(uuid);
  const fit = verdict?.fit;
  const used = () => usedPaths({ ...(row ?? device), uuid }, ceilingOf(row, device), state.frame.snapshot);
  const paths = fit ? shapes(fit) : device && (row || !process) ? used() : {};
  drawing.toggleAttribute("hidden", !Object.keys(paths).length);
  const text = JSON.stringify(paths);
  if (drawing.drawn === text) return;
  drawing.drawn = text;
  drawing.replaceChildren(...Object.entries(paths).map(([kind, d]) => svg("path", { class: kind, d, ...(!fit && { transform: "scale(10 5)" }) })));
}

/** Keeps the height of the cards while the pointer moves below them: what the user is about to click must not move. */
function holdHeight() {
  const { style } = $("problems");
  const held = movedWithin(STEADY) && document.querySelector("#problems ~ section:hover");
  style.height = held ? style.height || `${$("problems").getBoundingClientRect().height}px` : "";
  style.overflow = held ? "auto" : "";
}

let whole = false; // whether all cards are shown
let seen = false; // whether there has been a card: its place stays, so that the next one moves nothing

const isOfAnother = ({ card }) => Boolean(chosen() && card.uuid && card.uuid !== chosen().uuid);

/** Shows the first cards of the chosen device, or all of them. */
function fold() {
  const all = [...$("alerts").children];
  const cards = all.filter((node) => !isOfAnother(node));
  const first = WIDE.matches ? 3 : 2; // that are shown at first
  for (const node of all) node.hidden = !(whole ? cards : cards.slice(0, first)).includes(node);
  $("alerts").classList.toggle("whole", whole);
  $("problems-all").hidden = cards.length <= first;
  put($("problems-all"), whole ? "Show fewer" : `Show all ${cards.length}`);
}

export function showProblems() {
  holdHeight();
  rowsOf(state.frame); // names the rows that cards are about
  const cards = cardsOf(state.frame);
  sync($("alerts"), cards.slice(0, SHOWN), ({ key }) => key, create, update);
  const own = cards.filter((card) => !isOfAnother({ card }));
  const loud = own.filter(({ alert }) => !alert?.silenced_by.length);
  const silenced = own.length - loud.length;
  const ended = loud.filter(({ alert }) => alert && isEnded(alert)).length;
  const { devices } = state.frame.snapshot;
  const looked = chosen() ? label(chosen()) : many(devices.length, "GPU");
  const parts = [
    own.length ? many(loud.length - ended, "problem") : `None found on ${looked}: no leak, fragmentation, unattributed memory, idle program or out-of-memory error, and no alert from your rules`,
    ended ? `${ended} ended` : "",
    silenced ? `${silenced} silenced` : "",
    cards.length > SHOWN ? `${SHOWN} are shown` : "",
    own.length < cards.length ? `${cards.length - own.length} on other GPUs` : "",
    restOf(state.frame),
  ];
  put($("problems-count"), parts.filter(Boolean).join(" · "));
  seen ||= own.length > 0;
  $("alerts").hidden = !seen;
  fold();
  const { silences } = state.frame;
  $("silences-open").hidden = !silences.length;
  put($("silences-open"), many(silences.length, "silence"));
  const firing = cards.filter(({ alert }) => alert?.phase === "firing" && !isEnded(alert) && !alert.silenced_by.length).length;
  document.title = `${firing ? `(${firing}) ` : ""}gpumond ${clean(state.frame.host, 80)}`;
}

$("problems-all").addEventListener("click", () => {
  whole = !whole;
  fold();
});
$("silences-open").addEventListener("click", () => openView("alerts"));
