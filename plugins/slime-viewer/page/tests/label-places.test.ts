import { expect, test } from "vitest";
import { spread } from "../src/label-places";

test("labels that are apart stay where they are", () => {
  expect(spread([10, 30, 50], 10, 100)).toEqual([10, 30, 50]);
});

test("labels that lie over each other move down, in their order", () => {
  expect(spread([10, 10, 12, 60], 10, 100)).toEqual([10, 20, 30, 60]);
});

test("none is beyond the end", () => {
  expect(spread([90, 95, 98], 10, 100)).toEqual([80, 90, 100]);
});
