// The colors: those of the system, or dark or light ones, which the tab keeps. A link has none: they are its reader's.

import { $, put } from "./elements.js";

const SYSTEM = "(prefers-color-scheme: dark)";
/** Conditions of the dark colors by theme. */
const THEMES = { system: SYSTEM, dark: "all", light: "not all" };
const KEPT = "gpumond-theme";

const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
const dark = rules.find((rule) => rule.media?.mediaText === SYSTEM);

export const themes = Object.keys(THEMES);

let current = "system";
const isDark = () => matchMedia(THEMES[current]).matches;
const show = () => put($("theme"), isDark() ? "Light" : "Dark");

function apply(theme) {
  current = theme;
  if (dark) dark.media.mediaText = THEMES[theme];
  document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
  show();
}

export function setTheme(theme) {
  sessionStorage.setItem(KEPT, theme);
  apply(theme);
}

apply(themes.find((each) => each === sessionStorage.getItem(KEPT)) ?? "system");
matchMedia(SYSTEM).addEventListener("change", show);
$("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
