// Curves of the used memory in two baselines.

/** Levels of the used memory in order of time, by workload. */
const levelsOf = (baseline) =>
  new Map(
    baseline.workloads.map(({ workload, measures }) => [
      workload,
      measures.find(({ measure }) => measure === "used")?.distribution.levels ?? [],
    ]),
  );

/** Curves of the used memory of each workload in both baselines, as paths 1000 wide and 100 high. `top`: its bytes. */
export function curves(before, after) {
  const [old, fresh] = [levelsOf(before), levelsOf(after)];
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
