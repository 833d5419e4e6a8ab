// Calls of a program, innermost first, as text.

import { LIBRARIES, OWN_FILES } from "./words.js";

const SHOWN = 3; // calls of a site

export const callText = ({ file, line, function: what }) => `${file.replace(/.*-packages\//, "")}:${line} ${what}`;

/** The innermost calls of a site. */
export const siteText = ({ calls }) => calls.slice(0, SHOWN).map(callText).join(" < ") || "no Python stack";

const isOfLibrary = ({ file }) => !OWN_FILES.some((end) => file.endsWith(end)) && LIBRARIES.some((part) => file.includes(part));

/** The calls from the innermost one of the program itself on; all if there is none. */
export const ownCalls = (calls) => calls.slice(Math.max(0, calls.findIndex((call) => !isOfLibrary(call))));
