// The part of a long list that is drawn.

const MOST = 60; // items that are drawn, besides a pinned one
const SLACK = 4; // items drawn before and after those that can be seen

/** The item at a distance from the start of the list. All items have the height `size`; those in `extras`, pairs of
place and height in the order of places, have that in addition. */
function placeAt(distance, size, extras) {
  let above = 0;
  for (const [place, extra] of extras) {
    const end = (place + 1) * size + above;
    if (distance < end) break;
    if (distance < end + extra) return place;
    above += extra;
  }
  return Math.floor((distance - above) / size);
}

/** The distance of an item from the start of the list. */
export function distanceOf(place, size, extras) {
  let distance = place * size;
  for (const [other, extra] of extras) if (other < place) distance += extra;
  return distance;
}

/** What is drawn if the distances from `from` to `to` can be seen: places of items, and heights of gaps between them
(`after`: what precedes the gap).

`pinned`: the place of an item that is drawn in any case, because it has the focus; -1 for none. */
export function parts({ count, size, extras, from, to, pinned = -1 }) {
  const seen = (distance) => Math.min(Math.max(placeAt(distance, size, extras), 0), Math.max(0, count - 1));
  const first = Math.max(0, seen(from) - SLACK);
  const last = Math.min(count, first + MOST, seen(to) + 1 + SLACK);
  const places = Array.from({ length: Math.max(0, last - first) }, (_, number) => first + number);
  if (pinned >= last && pinned < count) places.push(pinned);
  else if (pinned >= 0 && pinned < first) places.unshift(pinned);
  const found = [];
  let end = 0;
  const gapTo = (distance) => distance > end && found.push({ gap: distance - end, after: found.at(-1)?.place ?? "start" });
  for (const place of places) {
    gapTo(distanceOf(place, size, extras));
    found.push({ place });
    end = distanceOf(place + 1, size, extras);
  }
  gapTo(distanceOf(count, size, extras));
  return found;
}
