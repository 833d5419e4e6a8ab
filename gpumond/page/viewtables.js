// Tables of the views: columns, rows, a filter, and downloads.

import * as address from "./address.js";
import { saveCsv } from "./downloads.js";
import { button, control, labeled, make, name, put, saveJson, sync, visible } from "./elements.js";

const MOST = 200; // rows that are drawn

const classes = ({ name: one, ...column }) => [...["number", "wide", "long"].filter((kind) => column[kind]), one && "one-line"].filter(Boolean).join(" ");

/** A table. A column has a title and either `text(item)` or `nodes(row)`; `row.item` is the item of a row. `name`: its
texts are not wrapped; `long`: they may be sentences; `wide`: left out where a table is narrow; `none`: why it has no
text, which the tooltip of the dash in its place says. */
export function createTable(label, columns) {
  const heads = columns.map((column) => {
    const cell = make(column.title ? "th" : "td", column.title);
    if (column.title) cell.scope = "col";
    cell.className = classes(column);
    return cell;
  });
  const table = make("table.list.wrapping", make("thead", make("tr", ...heads)), make("tbody"));
  table.setAttribute("aria-label", label);
  return Object.assign(table, { columns });
}

function createRow(columns) {
  const row = make("tr");
  columns.forEach((column, place) => {
    const cell = make(place ? "td" : "th", ...(column.nodes?.(row) ?? [make("bdi")]));
    if (!place) cell.scope = "row";
    cell.className = classes(column);
    if (place && column.text && !column.name) cell.dataset.title = column.title; // on a phone
    row.append(cell);
  });
  return row;
}

export function showTable(table, items, key) {
  const { columns } = table;
  sync(
    table.tBodies[0],
    items,
    key,
    () => createRow(columns),
    (row, item) => {
      row.item = item;
      columns.forEach(({ text, update, none = "" }, place) => {
        if (text) name(row.children[place].firstChild, text(item) || (none && "-"), 600);
        if (none && !text(item)) row.children[place].firstChild.title = none;
        update?.(row.children[place], item);
      });
    },
  );
}

/** A section with a table, a filter, in which Enter opens the first row, and downloads of what it finds. `record` makes the downloaded record,
`none` says what the table would list. */
export function createListing(title, columns, key, record, none) {
  const named = title.toLowerCase().replace(/ /g, "-");
  const table = createTable(title, columns);
  const count = control("p", { role: "status" });
  const find = control("input", { type: "search", autocomplete: "off", value: address.read(`find-${named}`), onkeydown: ({ key }) => void (key === "Enter" && visible("td a, td button", table)?.click()) }); // void: a handler that returns false cancels the key
  const csv = button("CSV", () => saveCsv(named, found().map(record)), "button.plain");
  const json = button("JSON", () => saveJson(named, found().map(record)), "button.plain");
  const controls = make("div.controls", labeled("Filter", find), make("span", csv, json));
  const section = make("section", make("div.title", make("h2", title), count, controls), table);
  let all = [];
  const textOf = (item) => columns.map((column) => column.text?.(item) ?? "").join("\n").toLowerCase();
  const found = () => {
    const terms = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    return terms.length ? all.filter((item) => terms.every((term) => textOf(item).includes(term))) : all;
  };
  const draw = () => {
    const items = found();
    const more = items.length > MOST ? `, the latest ${MOST} are shown` : "";
    put(count, all.length ? `${items.length} of ${all.length}${more}` : none);
    controls.hidden = !all.length;
    table.hidden = !items.length;
    showTable(table, items.slice(0, MOST), key);
  };
  find.oninput = () => {
    address.write(`find-${named}`, find.value.trim());
    draw();
  };
  section.show = (items) => {
    all = items;
    draw();
  };
  return section;
}
