// The link to what is shown, and downloads of the table of processes.

import { records, saveCsv } from "./downloads.js";
import { $, put, saveJson } from "./elements.js";
import { state } from "./state.js";
import { shownList } from "./table.js";

const SHOWN = 2000; // milliseconds for which the button says that the link is copied

/** Copies the page's address. Browsers have a clipboard on HTTPS and on the local machine only. */
async function copyLink() {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(location.href);
    else copySelected(location.href);
    put($("copied"), "Link copied");
  } catch {
    put($("copied"), "Your browser doesn't allow copying: the address bar has the link");
  }
  setTimeout(() => put($("copied"), ""), SHOWN);
}

function copySelected(text) {
  const area = Object.assign(document.createElement("textarea"), { value: text, readOnly: true });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("copying isn't allowed");
}

function saveProcesses(kind) {
  if (!state.frame) return;
  const { list, order, filter, group, gpu } = shownList();
  const { taken_at } = (state.past ?? state.frame).snapshot;
  const all = records(list);
  const document = { taken_at, host: state.frame.host, order, filter, group, gpu, processes: all };
  if (kind === "csv") saveCsv("processes", all.map((record) => ({ taken_at, ...record })));
  else saveJson("processes", document);
}

$("link").addEventListener("click", copyLink);
$("csv").addEventListener("click", () => saveProcesses("csv"));
$("json").addEventListener("click", () => saveProcesses("json"));
