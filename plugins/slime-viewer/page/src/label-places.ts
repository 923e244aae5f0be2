/** Places of labels side by side that must not lie over each other. */

/** `places` ascending; each moves as far as it has to, so that neighbors are `apart` from each other and none is beyond `end`. */
export function spread(places: readonly number[], apart: number, end: number): number[] {
  const moved = [...places];
  for (let at = 1; at < moved.length; at++) moved[at] = Math.max(moved[at]!, moved[at - 1]! + apart);
  let limit = end;
  for (let at = moved.length - 1; at >= 0 && moved[at]! > limit; at--) {
    moved[at] = limit;
    limit -= apart;
  }
  return moved;
}
