// What is rarely shown, which is requested then: views and dialogs that are mostly forms, the evidence of a verdict, the
// commands of the palette, and the demo's captions.

import "./baselines.js";
import { captionAt, captionsOf } from "./captions.js";
import { commandsOf as all } from "./commands.js";
import { drawFit as evidence } from "./evidencechart.js";
import "./rules.js";
import { silence as ofAlert } from "./silenceform.js";
import { signIn as ask } from "./signin.js";

const told = new Map(); // kinds of the demo's captions
let shown = "";

/** The demo's caption; empty if there is none. */
export function caption(frame) {
  const found = captionsOf(frame);
  shown = captionAt(found, shown, told, performance.now() / 1000);
  return found.get(shown) ?? "";
}

export const commandsOf = all;
export const drawFit = evidence;
export const silence = ofAlert;
export const signIn = ask;
