// Evidence of a verdict as a drawing: the points of a leak, their line and band, and the time at which the device is full.

const SPANS = 6; // the time of the crossing is drawn if it is within this multiple of the time of the points

/** Bytes of the line at a unix time. */
export const line = (fit, at) => fit.level_bytes + fit.slope_bytes_per_second * (at - fit.at);

/** Limits of the drawing: unix times and bytes. `full`: the bytes of this curve at which the device is full. */
export function limits(fit) {
  const { points, at, full_at: full, full_at_latest: latest, band_bytes: band } = fit;
  const from = points[0][0];
  const span = Math.max(1, at - from);
  const crossing = full !== null && full - from <= SPANS * span;
  const last = crossing ? Math.max(at, Math.min(latest ?? full, from + (SPANS + 1) * span)) : at + span;
  const bytes = points.map(([, value]) => value);
  const low = Math.max(0, Math.min(...bytes, line(fit, from)) - band);
  const high = Math.max(...bytes, line(fit, last)) + band;
  return { from, to: last, low, high, full: crossing ? line(fit, full) : null };
}

/** Paths of the drawing, 1000 wide and 100 high, by their class, in the order in which they are drawn. */
export function shapes(fit) {
  const { from, to, low, high, full } = limits(fit);
  const x = (at) => ((1000 * (Math.min(Math.max(at, from), to) - from)) / (to - from)).toFixed(2);
  const y = (bytes) => (100 - (100 * (bytes - low)) / Math.max(1, high - low)).toFixed(2);
  const along = (times, more) => times.map((at) => `${x(at)} ${y(line(fit, at) + more)}`);
  const ends = [from, to];
  const last = Math.max(from, fit.at);
  const found = {};
  if (full !== null) {
    const [earliest, latest] = [fit.full_at_earliest ?? fit.full_at, fit.full_at_latest ?? to];
    found.crossing = `M${x(earliest)} 0H${x(latest)}V100H${x(earliest)}Z`;
  }
  found.band = `M${[...along(ends, fit.band_bytes), ...along([to, from], -fit.band_bytes)].join("L")}Z`;
  found.line = `M${along([from, last], 0).join("L")}`;
  found.projection = `M${along([last, to], 0).join("L")}`;
  found.points = fit.points.map(([at, bytes]) => `M${x(at)} ${y(bytes)}h0`).join("");
  if (full !== null) {
    found.full = `M0 ${y(full)}H1000`;
    found.crossed = `M${x(fit.full_at)} 0V100`;
  }
  return found;
}
