import { expect, test } from "vitest";
import { chartsOf, groupsOf, LOOK_FIRST, matches, merged, type Metric } from "../src/metric-groups";

function metric(name: string): Metric {
  return { name, axis: "rollout/step", last: 1, points: 3, meaning: null };
}

test("a distribution is one chart, its mean the main line", () => {
  const charts = chartsOf(["rollout/response_len/max", "rollout/response_len/mean", "rollout/response_len/median", "rollout/response_len/min"].map(metric));
  expect(charts).toHaveLength(1);
  expect(charts[0]).toMatchObject({ name: "rollout/response_len", main: "rollout/response_len/mean", low: "rollout/response_len/min", high: "rollout/response_len/max" });
});

test("a lone /mean is a metric of its own", () => {
  expect(chartsOf([metric("rollout/staleness/mean")])[0]).toMatchObject({ name: "rollout/staleness/mean", high: null });
});

test("no metric is lost", () => {
  const names = ["a/max", "a/mean", "b/min", "c/mean", "rollout/raw_reward", "eval/x", "eval/version_max"];
  const drawn = chartsOf(names.map(metric)).flatMap((chart) => [chart.main, chart.median, chart.low, chart.high]).filter((name) => name !== null);
  expect(drawn.sort()).toEqual(names.sort());
});

test("what is worth a look comes first, and stays in its group", () => {
  const groups = groupsOf(chartsOf(["train/loss", "rollout/raw_reward", "eval/greedy", "eval/greedy-truncated_ratio", "eval/version_max"].map(metric)));
  expect(groups[0]!.title).toBe(LOOK_FIRST);
  expect(groups[0]!.charts.map(({ name }) => name)).toEqual(["rollout/raw_reward", "eval/greedy"]);
  expect(groups.find(({ title }) => title === "rollout")!.charts).toHaveLength(1);
});

test("filters: all words, or an expression", () => {
  expect(matches("rollout/zero_std/frac", "ZERO frac")).toBe(true);
  expect(matches("rollout/zero_std/frac", "zero loss")).toBe(false);
  expect(matches("train/pg_loss", "/^train.*loss$/")).toBe(true);
  expect(matches("train/pg_loss", "/(/")).toBe(false);
  expect(matches("anything", " ")).toBe(true);
});

test("metrics of several runs, each once", () => {
  expect(merged([[metric("a"), metric("b")], [metric("b"), metric("c")]]).map(({ name }) => name)).toEqual(["a", "b", "c"]);
});
