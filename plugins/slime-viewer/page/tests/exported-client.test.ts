import { expect, test } from "vitest";
import type { Exported, Groups, Samples, Series } from "../src/api";
import { ApiError, keyOf } from "../src/client";
import { ExportedClient } from "../src/exported-client";

const N = [null, null, null];

const GROUPS: Groups = {
  set: "train", step: 3, total: 3, offset: 0, took: 1,
  group: [7, 8, 9], prompt: ["add 1", "<script>alert(1)</script>", "add 3"], samples: [2, 2, 2],
  reward: [0.5, null, 0.25], lowest: [0, null, 0], highest: [1, null, 1], spread: [0.5, null, 0.4],
  tokens: [10, 20, 30], longest: [11, 22, 33], truncated: [0, 1, 0], oldest: [3, 3, 2], newest: [3, 3, 3],
  advantage: N, mismatch: N, entropy: N, parts: { format: [1, 0, 0.5] }, counts: {},
};

const SAMPLES: Samples = {
  set: "train", step: null, total: 3, exact: true, offset: 0, took: 1, indexed: 3, rows: 3,
  at: [{ step: 2, index: 0, part: 0 }, { step: 3, index: 1, part: 0 }, { step: 3, index: 2, part: 0 }],
  group: [0, 1, 1], prompt: ["p", "p", "p"], excerpt: ["one Two", "two", "three"], marks: [[], [], []],
  reward: [1, 0, 1], tokens: [5, 6, 7], trained: [5, 6, 7], status: ["completed", "truncated", "completed"],
  oldest: N, newest: N, log_prob: N, advantage: N, mismatch: N, entropy: N, parts: {}, counts: {},
};

const CURVE = { axis: "train/step", step: [0], tokens: null, hours: null, value: [1], low: null, high: null, attempts: [] };

const EXPORTED: Exported = {
  replies: {
    "/api/runs/demo/groups?step=3": GROUPS,
    "/api/runs/demo/samples?limit=100000": SAMPLES,
    "/api/runs/demo/series?names=a": { series: { a: CURVE } },
    "/api/runs/demo/series?names=b": { series: { b: CURVE } },
  },
  modules: {},
};

const client = new ExportedClient(EXPORTED);

test("keys have sorted parameters and no empty ones", () => {
  expect(keyOf("/api/x", { step: 3, set: null, q: "", a: "b c" })).toBe("/api/x?a=b%20c&step=3");
});

test("groups are sorted, those without a number last", async () => {
  const up: Groups = await client.get("/api/runs/demo/groups", { step: 3, sort: "reward" });
  const down: Groups = await client.get("/api/runs/demo/groups", { step: 3, sort: "reward", descending: 1 });
  expect(up.group).toEqual([9, 7, 8]);
  expect(down.group).toEqual([7, 9, 8]);
  expect(up.parts.format).toEqual([0.5, 1, 0]);
});

test("groups are filtered and searched", async () => {
  const filtered: Groups = await client.get("/api/runs/demo/groups", { step: 3, where: "tokens>=20 part:format<0.4" });
  expect(filtered.group).toEqual([8]);
  const found: Groups = await client.get("/api/runs/demo/groups", { step: 3, q: "ADD 3" });
  expect(found.group).toEqual([9]);
});

test("samples of one step and group; marks are where the words are", async () => {
  const found: Samples = await client.get("/api/runs/demo/samples", { step: 3, group: 1, where: "status=truncated", q: "two" });
  expect(found.at).toEqual([{ step: 3, index: 1, part: 0 }]);
  expect(found.marks).toEqual([[[0, 3]]]);
  expect(found.total).toBe(1);
});

test("an unknown column is an error that lists the known ones", async () => {
  const failed = client.get("/api/runs/demo/samples", { step: "all", sort: "rewrad" });
  await expect(failed).rejects.toThrow(ApiError);
  await expect(failed).rejects.toThrow(/reward/);
});

test("curves come from several replies", async () => {
  const reply: Series = await client.get("/api/runs/demo/series", { names: "a,b,c", points: 400 });
  expect(Object.keys(reply.series)).toEqual(["a", "b"]);
});

test("what was not exported is an error", async () => {
  await expect(client.get("/api/runs/demo/sample", { index: 5 })).rejects.toThrow("does not hold");
});
