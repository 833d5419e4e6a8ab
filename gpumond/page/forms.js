// What is mostly forms, which is requested when one of them is opened.

import "./baselines.js";
import "./rules.js";
import { silence as ofAlert } from "./silenceform.js";
import { signIn as ask } from "./signin.js";

export const silence = ofAlert;
export const signIn = ask;
