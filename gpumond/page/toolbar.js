// The link to what is shown, and the buttons of downloads of the table of processes.

import { $, put } from "./elements.js";
import { saveProcesses } from "./processdownloads.js";

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

$("link").addEventListener("click", copyLink);
for (const kind of ["csv", "json"]) $(kind).addEventListener("click", () => saveProcesses(kind));
