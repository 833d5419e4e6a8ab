// The colors: those of the system, or dark or light ones, which the address states.

import * as address from "./address.js";
import { $, put } from "./elements.js";

const SYSTEM = "(prefers-color-scheme: dark)";
/** Conditions of the dark colors by theme. */
const THEMES = { system: SYSTEM, dark: "all", light: "not all" };

const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
const dark = rules.find((rule) => rule.media?.mediaText === SYSTEM);

export const themes = Object.keys(THEMES);

let current = "system";
const isDark = () => matchMedia(THEMES[current]).matches;
const show = () => put($("theme"), isDark() ? "Light" : "Dark");

export function setTheme(theme) {
  current = theme;
  const chosen = theme === "system" ? "" : theme;
  address.write("theme", chosen);
  if (dark) dark.media.mediaText = THEMES[theme];
  document.documentElement.style.colorScheme = chosen;
  show();
}

setTheme(themes.includes(address.read("theme")) ? address.read("theme") : "system");
matchMedia(SYSTEM).addEventListener("change", show);
$("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
