import { expect, test } from "vitest";
import type { Timeline } from "../src/api";
import { clock, spanAt, sumsOf, ticks } from "../src/timeline-scale";

const TIMELINE: Timeline = {
  source: "recorded",
  first: 100,
  last: 200,
  start: 100,
  end: 200,
  lanes: [
    { name: "engines", devices: null, idle: 0.5 },
    { name: "trainer", devices: null, idle: null },
  ],
  lane: [0, 0, 1],
  kind: ["rollout", "eval", "train"],
  from: [100, 110, 150],
  to: [150, 112, 190],
  step: [0, null, 0],
  marks: [],
  steps: { step: [], staleness_mean: [], staleness_max: [], wait_ratio: [] },
};

test("ticks are at round times since the run began", () => {
  expect(ticks(103, 131, 100, 6)).toEqual([5, 10, 15, 20, 25, 30]);
  expect(ticks(100, 100.5, 100, 5).length).toBeGreaterThan(2);
});

test("clocks", () => {
  expect(clock(3907, 60)).toBe("1:05:07");
  expect(clock(307, 5)).toBe("5:07");
  expect(clock(7.25, 0.05)).toBe("7.25 s");
});

test("sums count what is in view", () => {
  const [engines, trainer] = sumsOf(TIMELINE, 140, 160);
  expect(engines!.seconds.get("rollout")).toBe(10);
  expect(engines!.seconds.has("eval")).toBe(false);
  expect(trainer!.seconds.get("train")).toBe(10);
});

test("below the pointer is the shorter span", () => {
  expect(spanAt(TIMELINE, 0, 111, 0)).toBe(1);
  expect(spanAt(TIMELINE, 0, 130, 0)).toBe(0);
  expect(spanAt(TIMELINE, 1, 130, 0)).toBe(-1);
});
