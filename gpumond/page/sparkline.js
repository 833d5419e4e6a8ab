// A small line of a device's used memory, 100 wide and 20 high.

export const STEP = 5; // seconds between two points

/** Adds what was used at a time or in a block to the points of the steps: each is the lowest and the highest use of its
step, whatever it was read from, and the newest one (`median`). */
export function add(points, { at, low, median, high }) {
  const last = points.at(-1);
  const begin = STEP * Math.floor(at / STEP);
  if (last?.at === begin) Object.assign(last, { low: Math.min(last.low, low), median, high: Math.max(last.high, high) });
  else if (!(begin < last?.at)) points.push({ at: begin, low, median, high });
}

/** Where bytes are drawn if `top` is at the top. */
export const heightOf = (bytes, top) => (19.5 - (19 * bytes) / top).toFixed(1);

/** The path of points from one unix time to another. It is interrupted where they are more than `gap` seconds apart. The
height is the size of the device, or the largest value if the size is unknown. */
export function sparkLine(points, size, from, to, gap) {
  const within = points.filter(({ at }) => at > from - STEP && at <= to);
  const top = Math.max(size ?? 0, ...within.map(({ high }) => high), 1);
  const x = (at) => ((100 * Math.max(0, at - from)) / (to - from)).toFixed(1);
  const y = (bytes) => heightOf(bytes, top);
  const follows = (place) => place > 0 && within[place].at - within[place - 1].at <= gap;
  const extent = ({ low, median, high }) => (low === high ? [median] : [low, high, median]).map((bytes) => `V${y(bytes)}`).join("");
  const part = (point, place) => (follows(place) ? `H${x(point.at)}` : `M${x(point.at)} ${y(point.median)}`) + extent(point);
  return within.map(part).join("");
}
