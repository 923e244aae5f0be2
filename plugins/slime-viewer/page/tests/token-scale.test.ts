import { expect, test } from "vitest";
import { classOf, extremes, scaleOf } from "../src/token-scale";

test("a diverging scale has zero in the middle and equal ends", () => {
  const scale = scaleOf({ name: "advantage", scale: "diverging", values: [-1, 0, 2, null] });
  expect(scale.low).toBe(-scale.high);
  expect(classOf(0, scale)).toBe("d4");
  expect(classOf(2, scale)).toBe("d8");
  expect(classOf(-2, scale)).toBe("d0");
  expect(Number(classOf(-1, scale).slice(1))).toBeLessThan(4);
});

test("all zero is the middle, and nothing is NaN", () => {
  const scale = scaleOf({ name: "mismatch", scale: "diverging", values: [0, 0] });
  expect(classOf(0, scale)).toBe("d4");
});

test("one outlier among thousands does not pale the others", () => {
  const values = Array.from({ length: 1000 }, (_, place) => place / 1000);
  values.push(1e6);
  const scale = scaleOf({ name: "entropy", scale: "sequential", values });
  expect(scale.high).toBeLessThan(1.01);
  expect(classOf(1e6, scale)).toBe("s6");
  expect(classOf(0.5, scale)).toBe("s3");
});

test("the least likely token has the strongest color", () => {
  const scale = scaleOf({ name: "rollout_log_prob", scale: "sequential", values: [-5, -2, 0] });
  expect(classOf(-5, scale)).toBe("s6");
  expect(classOf(0, scale)).toBe("s0");
});

test("equal kinds, equal classes; negative kinds too", () => {
  const scale = scaleOf({ name: "version", scale: "category", values: [0, 1, 7] });
  expect(classOf(1, scale)).toBe(classOf(7, scale));
  expect(classOf(-1, scale)).toBe("c5");
});

test("no number, no class", () => {
  const scale = scaleOf({ name: "entropy", scale: "sequential", values: [] });
  expect(classOf(null, scale)).toBe("");
  expect(classOf(undefined, scale)).toBe("");
});

test("extremes are in the order of the tokens", () => {
  expect(extremes({ name: "advantage", scale: "diverging", values: [0.1, -3, null, 2, 0] }, 2)).toEqual([1, 3]);
  expect(extremes({ name: "log_prob", scale: "sequential", values: [-0.1, -4, -9, 0] }, 2)).toEqual([1, 2]);
});
