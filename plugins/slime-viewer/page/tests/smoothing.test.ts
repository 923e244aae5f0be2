import { expect, test } from "vitest";
import { smooth } from "../src/smoothing";

test("the average starts at the first value, not at zero", () => {
  expect(smooth([4, 4, 4], 0.9)).toEqual([4, 4, 4].map((value) => expect.closeTo(value, 12)));
});

test("each value counts with the weights of a hand computation", () => {
  // Weight 0.5: (1*0.25 + 3*0.5) / 0.75 of the values 1, 3.
  expect(smooth([1, 3], 0.5)[1]).toBeCloseTo((1 * 0.25 + 3 * 0.5) / 0.75, 12);
});

test("gaps stay gaps and do not pull the average", () => {
  const smoothed = smooth([2, null, 2], 0.6);
  expect(smoothed[1]).toBeNull();
  expect(smoothed[2]).toBeCloseTo(2, 12);
});

test("weight 0 leaves the values", () => {
  expect(smooth([1, null, 5], 0)).toEqual([1, null, 5]);
});
