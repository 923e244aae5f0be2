/** Exponential moving averages, without the pull towards zero of the first values. */

/**
 * `weight` in [0, 1): share of the average that each value leaves in place. Null stays null and does not enter.
 * The average starts at the first value: it is divided by the weights that it has had so far.
 */
export function smooth(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return [...values];
  let average = 0;
  let decay = 1;
  return values.map((value) => {
    if (value === null) return null;
    average = average * weight + value * (1 - weight);
    decay *= weight;
    return average / (1 - decay);
  });
}
