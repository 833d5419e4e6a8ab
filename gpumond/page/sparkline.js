// A small line of a device's used memory, 100 wide and 20 high.

/** The path of points (unix time, bytes) from one time to another. It is interrupted where they are more than `gap`
seconds apart. The height is the size of the device, or the largest value if the size is unknown. */
export function sparkLine(points, size, from, to, gap) {
  const within = points.filter(({ at }) => at >= from && at <= to);
  const top = Math.max(size ?? 0, ...within.map(({ median }) => median), 1);
  const x = (at) => ((100 * (at - from)) / (to - from)).toFixed(1);
  const y = (bytes) => (19.5 - (19 * bytes) / top).toFixed(1);
  const follows = (place) => place > 0 && within[place].at - within[place - 1].at <= gap;
  const part = ({ at, median }, place) => (follows(place) ? `H${x(at)}V${y(median)}` : `M${x(at)} ${y(median)}`);
  return within.map(part).join("");
}
