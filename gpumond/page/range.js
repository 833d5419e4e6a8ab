// The range of time that charts show, its changes, and the lines of their axes.

export const RANGES = [
  ["15 min", 900],
  ["1 h", 3600],
  ["6 h", 21600],
  ["24 h", 86400],
];
/** Ranges of charts. */
export const CHART_RANGES = [["5 min", 300], ...RANGES];
const LONGEST = 86400;
const SHORTEST = 10;

/** A range: its length, and its end as unix time; the end is null if it follows the newest frame. */
export const newest = (seconds = RANGES[0][1]) => ({ seconds, to: null });

/** Start and end as unix times. */
export function limits({ seconds, to }, now) {
  const end = to ?? now;
  return { from: end - seconds, to: end };
}

/** A range from one time to another, within the last day and not too short. Its end follows the newest frame if it is
`now` or later. */
export function between(from, to, now) {
  const middle = (from + to) / 2;
  const seconds = Math.min(Math.max(to - from, SHORTEST), LONGEST);
  const end = Math.min(Math.max(middle + seconds / 2, now - LONGEST + seconds), now);
  return { seconds, to: end >= now ? null : end };
}

/** The range with its length multiplied by `factor`; the time `at` keeps its place. */
export function zoomed(range, at, factor, now) {
  const { from, to } = limits(range, now);
  const seconds = Math.min(Math.max(range.seconds * factor, SHORTEST), LONGEST);
  const start = at - (seconds * (at - from)) / (to - from);
  return between(start, start + seconds, now);
}

/** The range that is `share` of its length later. */
export function moved(range, share, now) {
  const { from, to } = limits(range, now);
  const by = Math.min(share * range.seconds, now - to);
  return between(from + by, to + by, now);
}

/** The range as a text for the address: its length, or start and end. */
export const rangeText = ({ seconds, to }) => (to === null ? String(Math.round(seconds)) : `${Math.round(to - seconds)}-${Math.round(to)}`);

/** The range of such a text; null if it is none. */
export function rangeOf(text) {
  const [, first, last] = /^(\d{1,12})(?:-(\d{1,12}))?$/.exec(text) ?? [];
  if (first === undefined) return null;
  const seconds = last === undefined ? Number(first) : last - first;
  return seconds >= SHORTEST && seconds <= LONGEST ? { seconds, to: last === undefined ? null : Number(last) } : null;
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 300, 600, 900, 1800, 3600, 7200, 10800, 21600];

/** Times of the lines of an axis: round times of day, at most `most` of them. */
export function timeLines(from, to, most) {
  const step = STEPS.find((each) => (to - from) / each <= most) ?? STEPS.at(-1);
  const zone = 60 * new Date(from * 1000).getTimezoneOffset();
  const first = Math.ceil((from - zone) / step) * step + zone;
  return Array.from({ length: Math.max(0, Math.floor((to - first) / step) + 1) }, (_, number) => first + number * step);
}

/** Values of the lines of an axis of bytes from 0 to `top`: multiples of a power of two, two to four. */
export function byteLines(top) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(top, 4) / 4));
  return Array.from({ length: Math.floor(top / step) }, (_, number) => (number + 1) * step);
}
