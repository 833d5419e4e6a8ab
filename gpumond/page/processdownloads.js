// Downloads of the table of processes.

import { saveCsv } from "./downloads.js";
import { saveJson } from "./elements.js";
import { records } from "./processrecords.js";
import { state } from "./state.js";
import { shownList } from "./table.js";

/** Saves the rows that are shown, as `csv` or `json`. */
export function saveProcesses(kind) {
  if (!state.frame) return;
  const { list, order, filter, group, gpu } = shownList();
  const { taken_at } = (state.past ?? state.frame).snapshot;
  const all = records(list);
  const document = { taken_at, host: state.frame.host, order, filter, group, gpu, processes: all };
  if (kind === "csv") saveCsv("processes", all.map((record) => ({ taken_at, ...record })));
  else saveJson("processes", document);
}
