// Times for which values are known, and those for which they are not.

export const NARROW = 0.01; // unknown parts below this share of the range are not marked

/** The points as intervals of time within the range. A block has a length, and the first one of the daemon begins with
the daemon. A sample lasts until the next one, unless that is more than three times the usual distance away. One at the
end of the range begins at the end of the one before it, at the latest halfway. */
export function intervals(points, length, from, to, started = -Infinity) {
  const times = points.map((point) => point.at);
  const distances = times.slice(1).map((at, place) => at - times[place]);
  const usual = [...distances].sort((one, other) => one - other)[distances.length >> 1] ?? 1;
  const before = times.at(-2);
  if (distances.length && times.at(-1) >= to)
    times[times.length - 1] = to - before > 3 * usual ? to - usual : before + Math.min(usual, (to - before) / 2);
  const limit = length === null ? 3 * Math.max(1, usual) : length;
  return points
    .map((point, place) => {
      const next = times[place + 1] ?? to;
      const at = times[place];
      const end = next - at <= 1.1 * limit ? next : at + (length ?? usual);
      const begin = end > started ? Math.max(at, started) : at;
      return { ...point, at: Math.max(from, begin), end: Math.min(end, to) };
    })
    .filter((point) => point.end > point.at);
}

/** Intervals that follow one another, as runs. */
export function runs(ranges) {
  const all = [];
  for (const range of ranges) {
    const last = all.at(-1)?.at(-1);
    if (last && range.at - last.end < 1e-3) all.at(-1).push(range);
    else all.push([range]);
  }
  return all;
}

/** Parts of the range from `from` to `to` for which no interval is known. */
export function unknown(ranges, from, to) {
  const known = runs(ranges);
  const starts = [from, ...known.map((run) => run.at(-1).end)];
  const ends = [...known.map((run) => run[0].at), to];
  const parts = starts.map((start, place) => ({ from: start, to: ends[place] }));
  return parts.filter((part) => part.to - part.from > NARROW * (to - from));
}

/** Points, and those that were read later: from the last known one on. The daemon derives times from its newest reading,
so that the time of a point may differ slightly from one response to another. */
export function joined(known, fresh, from) {
  if (!fresh.length) return known;
  const [before, last] = known.slice(-2);
  const end = fresh[0].at - (last.at - before.at) / 2;
  return [...known.filter(({ at }) => at >= from && at < end), ...fresh];
}
