// Evidence of a verdict in words and figures.

import { about, duration, extent, sizeText, percent, words } from "./format.js";

/** The rate, and the time until the device is full with its limits, in a sentence. `now`: unix time of the frame. */
export function summary(fit, now = fit.at) {
  const { slope_bytes_per_second: slope, slope_low_bytes_per_second: slow, slope_high_bytes_per_second: fast } = fit;
  const [middle, range] = [sizeText(60 * slope), extent({ low: 60 * slow, high: 60 * fast })];
  const rate = `${middle}/min${range === middle ? "" : ` (${range})`} in the ${duration(fit.at - fit.points[0][0])} shown`;
  if (fit.full_at === null) return `${rate}.`;
  if (fit.full_at <= now) return `${rate}; the GPU would be full by now.`;
  const left = about(fit.full_at - now);
  const limit = (at, word) => (at === null || about(at - now) === left ? "" : `${about(at - now)} at the ${word}`);
  const interval = [limit(fit.full_at_earliest, "earliest"), limit(fit.full_at_latest, "latest")].filter(Boolean).join(", ");
  return `${rate}; counted from its recent peak, the GPU will be full in ${left}${interval && ` (${interval})`}.`;
}

const UNITS = [
  ["_bytes_per_second", (value) => `${sizeText(60 * value)}/min`],
  ["_bytes_per_step", (value) => `${sizeText(value)}/step`],
  ["_bytes", sizeText],
  ["_seconds", duration],
  ["_ratio", (value) => percent(value, 1)],
];

/** Figures of a verdict as pairs of a term and its value. */
export const figures = (evidence) =>
  evidence.map(([name, value]) => {
    const [suffix, text] = UNITS.find(([each]) => name.endsWith(each)) ?? ["", (number) => String(Number(number.toPrecision(3)))];
    return [words(name.slice(0, name.length - suffix.length)), text(value)];
  });
