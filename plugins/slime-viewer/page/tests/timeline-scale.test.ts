import { expect, test } from "vitest";
import type { Timeline } from "../src/api";
import { clock, rowsOf, spanAt, sumsOf, ticks } from "../src/timeline-scale";

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
  memory: { time: [], what: [], used: [], limit: [] },
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

test("rollouts that overlap have rows of their own", () => {
  const ahead = { ...TIMELINE, lane: [0, 0, 0, 1], kind: ["rollout", "rollout", "rollout", "rollout"], from: [100, 110, 121, 100], to: [120, 130, 140, 140], step: [0, 1, 2, 0] };
  expect(rowsOf(ahead)).toEqual({ row: [0, 1, 0, 0], rows: [2, 2, 2, 1] });
  expect(spanAt(ahead, 0, 115, 0, 0.1)).toBe(0);
  expect(spanAt(ahead, 0, 115, 0, 0.9)).toBe(1);
});

test("of spans over each other the inner one counts", () => {
  const nested = { ...TIMELINE, lane: [0, 0, 0, 0], kind: ["weights", "sleep", "wake", "train"], from: [100, 104, 106, 120], to: [110, 106, 112, 130], step: [0, 0, 0, 0] };
  const seconds = sumsOf(nested, 100, 125)[0]!.seconds;
  // The update's last 4 s lie below the waking, which ends after it.
  expect([...seconds]).toEqual([["weights", 4], ["sleep", 2], ["wake", 6], ["train", 5]]);
});

test("below the pointer is the shorter span", () => {
  expect(spanAt(TIMELINE, 0, 111, 0)).toBe(1);
  expect(spanAt(TIMELINE, 0, 130, 0)).toBe(0);
  expect(spanAt(TIMELINE, 1, 130, 0)).toBe(-1);
});
