// The rows that the user has marked for a comparison.

import * as address from "./address.js";
import { $, put } from "./elements.js";
import { addressOf, isAt, rowsOf } from "./processlist.js";
import { state } from "./state.js";
import { openView } from "./views.js";

export const MOST = 4; // programs that are compared at once

let marked = address.read("compare").split(",").filter(Boolean);

/** Addresses of the marked rows. */
export const markedRows = () => marked;
export const isMarked = (row) => marked.some((each) => isAt(each, row));

/** Marks the newest of these addresses, as many as can be compared. */
export function mark(addresses) {
  marked = addresses.slice(-MOST);
  address.write("compare", marked.join(","));
  showCount();
}

/** Marks a row for the comparison, or removes it; returns whether it is marked. */
export function setMarked(row, on) {
  const others = marked.filter((each) => !isAt(each, row));
  mark(on ? [...others, addressOf(row, rowsOf(state.frame))] : others);
  return on;
}

function showCount() {
  const open = $("compare-open");
  open.hidden = !marked.length;
  put(open, `Compare ${marked.length}`);
}

$("compare-open").addEventListener("click", () => openView("compare"));
showCount();
