// What a receipt says besides its figures.

import { extent, sizeText } from "./format.js";

/** Sentences on why planned, expected, released and driver bytes differ. */
export function* differences({ expected, before, released_bytes: released, raced, ...receipt }, plan) {
  if (plan?.expected && expected && extent(plan.expected) !== extent(expected)) {
    const amounts = (each) => (each ? ` (${sizeText(each.held_bytes)} held, ${sizeText(each.live_bytes)} live)` : "");
    const held = [plan.before, before].map(amounts);
    if (!held[0] || held[0] === held[1]) held.fill("");
    yield `The program's memory changed between the plan${held[0]} and the flush${held[1]}.`;
  }
  if (expected && released !== null && (released < expected.low || released > expected.high)) {
    const cause = raced ? " because the program allocated or freed memory during the flush" : "";
    yield `The allocator released ${released < expected.low ? "less" : "more"} than expected at the start${cause}.`;
  }
  const driver = receipt.driver_released_bytes;
  if (driver === null && before) yield "The driver doesn't report this process's memory, so the release isn't confirmed.";
  else if (driver !== null && raced && driver !== released)
    yield "The driver's figure differs because the program allocated or freed memory during the flush.";
}
