/** The list from which a sample was opened: previous and next follow its order. */

import type { SampleKey } from "./api";

let kept: { keys: readonly SampleKey[]; address: string } = { keys: [], address: "" };

export function keepListing(keys: readonly SampleKey[], address: string): void {
  kept = { keys, address };
}

export interface Neighbors {
  /** From 0. */
  place: number;
  count: number;
  before: SampleKey | null;
  behind: SampleKey | null;
  /** Of the list. */
  address: string;
}

/** Null if the sample is not in the list. */
export function neighborsOf({ step, index, part }: SampleKey): Neighbors | null {
  const { keys, address } = kept;
  const place = keys.findIndex((key) => key.step === step && key.index === index && key.part === part);
  return place < 0 ? null : { place, count: keys.length, before: keys[place - 1] ?? null, behind: keys[place + 1] ?? null, address };
}
