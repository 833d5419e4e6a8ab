// Numbers, times and names as text.

import { FORCED, NAMES } from "./words.js";

/** A time of the daemon's texts, which are in UTC, in the browser's time zone. */
function local(_, day, time) {
  const at = Date.parse(`${day ?? new Date().toISOString().slice(0, 10)}T${time}Z`) / 1000;
  return clock(at, day ? Date.now() / 1000 : at);
}

/** The text without characters that change how other text reads: controls, escapes and direction marks, in the browser's
time zone, without the backticks of code, and with the command that does what a key of the API does. */
export function clean(text, most = 300) {
  const safe = String(text ?? "")
    .replace(FORCED, "with gpumond flush --force")
    .replace(/`([^`]+)`/g, "$1")
    .replace(/(?:([\d-]{10}) )?\b(\d\d:\d\d:\d\d) UTC\b/g, local)
    .slice(0, most + 1)
    .replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, "\uFFFD");
  return safe.length > most ? safe.slice(0, most - 1) + "…" : safe;
}

/** One decimal, ties to even, as the command line writes it. */
function tenths(value) {
  const tie = Number.isInteger(value * 4) && !Number.isInteger(value * 2);
  const below = Math.floor(value * 10);
  return tie ? ((below + Math.abs(below % 2)) / 10).toFixed(1) : value.toFixed(1);
}

/** Bytes with a binary unit, such as `31.2 GiB`; `-` if unknown. The number has at most three digits before the point. */
export function sizeText(bytes) {
  if (bytes === null || bytes === undefined) return "-";
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < (unit === "B" ? 999.5 : 999.95)) return unit === "B" ? `${Math.round(size)} B` : `${tenths(size)} ${unit}`;
    size /= 1024;
  }
  return `${tenths(size)} TiB`;
}

/** A difference of bytes with its sign; `-` if one of them is unknown. */
export const signed = (bytes) => (bytes > 0 ? `+${sizeText(bytes)}` : sizeText(Number.isNaN(bytes) ? null : bytes));

/** Growth per minute with two digits, so that the text is the same in the next seconds: `about 840 MiB/min`. */
export function rate(bytes) {
  const [number, unit] = sizeText(bytes).split(" ");
  const size = Number(Number(number).toPrecision(2));
  return `about ${size.toFixed(Math.abs(size) < 10 && unit !== "B" ? 1 : 0)} ${unit}/min`;
}

/** An interval of bytes, such as `1.0 GiB to 1.5 GiB`. */
export const extent = ({ low, high }) => (sizeText(low) === sizeText(high) ? sizeText(low) : `${sizeText(low)} to ${sizeText(high)}`);

/** Seconds, to the nearest second, minute or hour: `42 s`, `1 min 39 s`, `26 min`, `2 h 5 min`, `3 d 4 h`. */
export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 600) return parts(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 1440) return parts(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(seconds / 3600);
  return parts(Math.floor(hours / 24), "d", hours % 24, "h");
}

/** Seconds, from a minute on in whole minutes, so that the text seldom changes. */
export const age = (seconds) => duration(seconds < 60 ? seconds : 60 * Math.floor(seconds / 60));

/** A time that is known roughly: `about 7 min`, `about 2 h`. */
export function about(seconds) {
  if (seconds < 60) return "less than 1 min";
  const minutes = seconds / 60;
  if (minutes < 90) return `about ${Math.round(minutes < 20 ? minutes : 5 * Math.round(minutes / 5))} min`;
  return minutes < 2880 ? `about ${Math.round(minutes / 60)} h` : `about ${Math.round(minutes / 1440)} d`;
}

const parts = (large, unit, small, subunit) => (small ? `${large} ${unit} ${small} ${subunit}` : `${large} ${unit}`);

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const percent = (part, whole) => `${Math.round((100 * part) / whole)}%`;

const two = (number) => String(number).padStart(2, "0");

/** The time of day of a unix time, with the weekday if it is not the day of `now`. */
export function clock(at, now = at) {
  const date = new Date(at * 1000);
  const time = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
  const today = at === now || date.toDateString() === new Date(now * 1000).toDateString();
  return today ? time : `${date.toLocaleDateString([], { weekday: "short" })} ${time}`;
}

export const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;
/** A kind such as `alert-fired` or `coherent_memory` in words. */
export const words = (kind) => NAMES[kind] ?? String(kind).replace(/[-_]/g, " ");
export const sum = (values) => values.reduce((total, value) => total + value, 0);
