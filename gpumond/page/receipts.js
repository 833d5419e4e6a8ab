// The view of receipts: what past flushes and suspensions were expected to release, and what they released.

import { capital, clean, clock, duration, extent, sizeText } from "./format.js";
import { createListing } from "./viewtables.js";
import { record } from "./receiptrecords.js";
import { differences } from "./receipttexts.js";
import { callerText, state } from "./state.js";
import { read } from "./live.js";
import { addView } from "./views.js";

const gpuOf = (uuid) => String(state.devices.get(uuid)?.index ?? uuid);
const gpu = ({ device_uuid: uuid, device_uuids: more }) => (more ?? [uuid]).filter(Boolean).map(gpuOf).join(", ");
const amount = (value) => (value === null || value === undefined ? "" : value.low === undefined ? sizeText(value) : extent(value));
const remarks = (receipt) => [...differences(receipt, { expected: receipt.planned }), capital(receipt.reason)].filter(Boolean).join(" ");

const finishedAt = ({ started_at: at, duration_seconds: seconds }) => at + seconds;

const COLUMNS = [
  { title: "Finished", text: (receipt) => clock(finishedAt(receipt), state.frame.snapshot.taken_at) },
  { title: "Program", text: ({ workload, pid }) => `${clean(workload || "?", 80)} (pid ${pid})`, name: true },
  { title: "GPU", text: gpu },
  { title: "Pool", text: ({ allocator }) => allocator ?? "", none: "A suspension moves all of a program’s memory.", wide: true },
  { title: "Outcome", text: ({ outcome }) => outcome },
  { title: "Planned", text: ({ planned }) => amount(planned), none: "No plan was requested.", number: true },
  { title: "Expected at start", text: ({ expected }) => amount(expected), none: "Unknown.", number: true },
  { title: "Released", text: ({ released_bytes: bytes }) => amount(bytes), none: "No allocator releases memory here.", number: true },
  { title: "Driver", text: ({ driver_released_bytes: bytes }) => amount(bytes), none: "Not reported by the driver. (A resumption releases nothing.)", number: true },
  { title: "By", text: ({ requested_by: by, requested_for: program }) => (program ? `gpumond for ${program}, requested by ` : "") + callerText(by) },
  { title: "Remarks", text: remarks, long: true },
];

/** The receipt of a suspension or resumption with the keys of a flush's. */
const ofSuspension = ({ expected_bytes: bytes, released_bytes: driver, host_bytes: host, returned_bytes: back, reason, remedy, ...receipt }) => ({
  ...receipt,
  expected: bytes === null ? null : { low: bytes, likely: bytes, high: bytes },
  released_bytes: null,
  driver_released_bytes: driver,
  reason: [reason, remedy, host ? `${sizeText(host)} on the host` : "", back ? `the driver counts ${sizeText(back)} again after ${duration(receipt.duration_seconds)}` : ""].filter(Boolean).join("; "),
});

const keyOf = (receipt) => [receipt.started_at, receipt.pid, receipt.allocator, receipt.device_uuid].join();
const NONE = "Nothing has been flushed or suspended yet. A receipt compares the expected release with the actual one.";
let section;

async function load() {
  const answers = await Promise.all(["api/v1/receipts", "api/v1/suspensions/receipts"].map((route) => read(route)));
  if (!answers.every(({ ok }) => ok)) return;
  const [flushes, suspensions] = await Promise.all(answers.map((answer) => answer.json()));
  const receipts = [...flushes.filter(({ outcome }) => outcome !== "planned"), ...suspensions.map(ofSuspension)];
  section.show(receipts.sort((one, other) => finishedAt(other) - finishedAt(one)));
}

addView("receipts", () => (section = createListing("Receipts", COLUMNS, keyOf, record, NONE)), load);
