// The commands of the palette: pairs of a text and an action.

import { showRange } from "./chart.js";
import { $ } from "./elements.js";
import { newestEvents, showMinute } from "./events.js";
import { flush } from "./flushdialog.js";
import { clock, sizeText } from "./format.js";
import { isMarked, markedRows, setMarked } from "./markedrows.js";
import { expire, matchersOf } from "./silences.js";
import { showDevice } from "./shareschart.js";
import { visit } from "./palette.js";
import { choose } from "./selection.js";
import { cardCommands } from "./problems.js";
import { CHART_RANGES } from "./range.js";
import { COLUMNS, GROUPS, IDLE, rowsOf } from "./processlist.js";
import { allowsFlush, hasAgent, hasPools, label, processKey, reclaimableOf, state } from "./state.js";
import { wordOf } from "./suspend.js";
import { groupBy, showProcess, sortById, suspendRow } from "./table.js";
import { setTheme, themes } from "./theme.js";
import { TITLES, openView, why } from "./views.js";
import { RUNBOOKS } from "./words.js";

const BUTTONS = ["pause", "link", "help-open", "sign"]; // of the header: each is a command, too

export function* commandsOf() {
  for (const [name, title] of Object.entries(TITLES)) yield [`View ${title}`, () => openView(name)];
  yield ["Waiting for memory: queue", () => openView("queue")];
  yield ["Out of memory (OOM): cases", () => openView("cases")];
  for (const id of BUTTONS) yield [$(id).textContent, () => $(id).click()];
  for (const theme of themes) yield [`Theme ${theme}`, () => setTheme(theme)];
  if (!state.frame) return;
  yield* cardCommands();
  const { devices } = state.frame.snapshot;
  const rows = rowsOf(state.frame);
  for (const row of rows) yield [`Show ${subjectOf(row)}`, () => visit(() => showProcess(row.key))];
  for (const kind of ["csv", "json"]) yield [`Download (export) processes as ${kind.toUpperCase()}`, () => $(kind).click()];
  yield ["Download (export) chart as CSV", () => visit(() => $("hero").querySelector(".save").click())];
  if (devices.length > 1) yield ["Show all GPUs", () => visit(() => choose(null))];
  if (rows.some(hasAgent)) yield ["Flush all programs", () => flush({ all: true }, "all programs")];
  for (const device of devices) {
    yield [`Show ${label(device)} ${device.name}`, () => visit(() => showDevice(device))];
    if (reclaimableOf([device]).bytes) yield [`Flush ${label(device)}`, () => flush({ device: device.uuid }, label(device))];
  }
  for (const row of rows.filter((row) => allowsFlush(row) && row.cached_bytes))
    yield [`Flush ${subjectOf(row)}`, () => flush({ pid: row.pid, start_ticks: row.start_ticks }, subjectOf(row))];
  for (const row of rows.filter(hasPools)) yield [`Why ${subjectOf(row)}`, () => why(row.pid, subjectOf(row))];
  for (const row of rows.filter(({ suspension, suspendable }) => suspension || suspendable))
    yield [`${wordOf(row)} ${subjectOf(row)}`, () => visit(() => suspendRow(row.key))];
  const { length: marked } = markedRows();
  if (marked > 1) yield [`Compare the ${marked} marked programs`, () => openView("compare")];
  for (const row of rows.filter(({ device }) => device))
    yield [isMarked(row) ? `Remove ${subjectOf(row)} from comparison` : `Mark ${subjectOf(row)} to compare it`, () => setMarked(row, !isMarked(row))];
  for (const { id, title } of COLUMNS) yield [`Sort by ${title.toLowerCase()}`, () => visit(() => sortById(id))];
  for (const { device_uuid: uuid, kind, ...of } of state.frame.verdicts) {
    const row = kind === IDLE && rows.find((each) => each.device_uuid === uuid && processKey(each) === processKey(of));
    if (row) yield [`Idle memory (waste): ${sizeText(row.used_bytes)} of ${subjectOf(row)}`, () => visit(() => showProcess(row.key))];
  }
  for (const name of ["", ...Object.keys(GROUPS)]) yield [`Group by ${name || "nothing"}`, () => visit(() => groupBy(name))];
  for (const [text, seconds] of CHART_RANGES) yield [`Range ${text} (zoom)`, () => visit(() => showRange(seconds))];
  for (const name of RUNBOOKS) yield [`Runbook ${name}`, () => location.assign(`docs/runbooks/${name}`)];
  for (const silence of state.frame.silences) yield [`End the silence for ${matchersOf(silence)}`, () => expire(silence.id)];
  for (const event of newestEvents()) yield [`Minute before ${clock(event.at)} ${event.summary}`, () => visit(() => showMinute(event))];
}

const subjectOf = ({ program, pid, device }) => `${program} (pid ${pid})${device ? ` on ${label(device)}` : ""}`;
