// Differences of two baselines, as the daemon computes them, and their curves.

const Z = 1.96; // 95 %

const middle = (ordered) => (ordered[(ordered.length - 1) >> 1] + ordered[ordered.length >> 1]) / 2;

/** The Hodges-Lehmann shift from one list of levels to another, with its 95 % interval; null for too few levels. */
export function shift(before, after) {
  const differences = before.flatMap((one) => after.map((other) => other - one)).sort((one, other) => one - other);
  const [n, m] = [before.length, after.length];
  const rank = Math.floor((n * m) / 2 - Z * Math.sqrt((n * m * (n + m + 1)) / 12));
  const [low, high] = rank < 1 ? [null, null] : [differences[rank - 1], differences.at(-rank)];
  return { difference: middle(differences), low, high };
}

const workloadsOf = (baseline) => new Map(baseline.workloads.map((each) => [each.workload, each]));
const measuresOf = (side) => new Map((side?.measures ?? []).map(({ measure, distribution }) => [measure, distribution]));
const perHour = (side) => (side?.seconds && side.retries !== null ? (3600 * side.retries) / side.seconds : null);

function difference(workload, measure, stat, before, after, found) {
  const known = before !== null && after !== null;
  const simple = { difference: known ? after - before : null, low: null, high: null };
  const shifted = found ?? simple;
  const ratio = known && before ? shifted.difference / before : null;
  return { workload, measure, stat, before, after, ratio, ...shifted };
}

function* differencesOf(workload, one, other) {
  const [before, after] = [measuresOf(one), measuresOf(other)];
  for (const measure of new Set([...before.keys(), ...after.keys()])) {
    const [old, fresh] = [before.get(measure), after.get(measure)];
    yield difference(workload, measure, "peak", old?.peak ?? null, fresh?.peak ?? null);
    const shifted = old && fresh && shift(old.levels, fresh.levels);
    yield difference(workload, measure, "typical", old?.typical ?? null, fresh?.typical ?? null, shifted);
  }
  const rates = [perHour(one), perHour(other)];
  if (rates.some((rate) => rate !== null)) yield difference(workload, "retries", "rate", ...rates);
}

/** All differences of two baselines, by workload and measure. */
export function compare(before, after) {
  const [old, fresh] = [workloadsOf(before), workloadsOf(after)];
  const names = [...new Set([...old.keys(), ...fresh.keys()])].sort();
  return names.flatMap((name) => [...differencesOf(name, old.get(name), fresh.get(name))]);
}

/** Curves of the used memory of each workload in both baselines, as paths 1000 wide and 100 high. `top`: its bytes. */
export function curves(before, after) {
  const levels = (baseline) =>
    new Map([...workloadsOf(baseline)].map(([name, each]) => [name, measuresOf(each).get("used")?.levels ?? []]));
  const [old, fresh] = [levels(before), levels(after)];
  return [...new Set([...old.keys(), ...fresh.keys()])].sort().map((workload) => {
    const sides = [old.get(workload) ?? [], fresh.get(workload) ?? []];
    const top = Math.max(1, ...sides.flat());
    const path = (values) => values.map((bytes, place) => pointOf(values.length, top, bytes, place)).join("");
    return { workload, top, before: path(sides[0]), after: path(sides[1]) };
  });
}

function pointOf(count, top, bytes, place) {
  const y = (100 - (100 * bytes) / top).toFixed(2);
  const x = (share) => ((1000 * share) / count).toFixed(2);
  return place ? `V${y}H${x(place + 1)}` : `M0 ${y}H${x(1)}`;
}
