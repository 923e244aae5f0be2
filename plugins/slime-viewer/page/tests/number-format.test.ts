import { expect, test } from "vitest";
import { bytes, compact, decimalsOf, duration, fixed, percent, short, versions } from "../src/number-format";

test.each([
  [0, "0"],
  [0.95254, "0.9525"],
  [12.3456, "12.35"],
  [1234.5, "1,235"],
  [-0.5, "\u22120.5"],
  [0.00001234, "1.2e\u22125"],
  [3501568, "3.5M"],
  [null, "–"],
])("short(%s)", (value, text) => {
  expect(short(value)).toBe(text);
});

test("axes have short numbers", () => {
  expect([0.25, 1500, 20_000, 3e6].map(compact)).toEqual(["0.25", "1,500", "20k", "3M"]);
});

test("a column has equal decimals", () => {
  const values = [0.5, 0.123456, null];
  expect(values.map((value) => fixed(value, decimalsOf(values)))).toEqual(["0.5000", "0.1235", ""]);
  expect(decimalsOf([1, 20, 300])).toBe(0);
});

test("small shares are not zero", () => {
  expect([0, 0.0004, 0.034, 0.58].map(percent)).toEqual(["0%", "0.04%", "3.4%", "58%"]);
});

test("durations", () => {
  expect([0.147, 12.34, 200, 3900].map(duration)).toEqual(["147 ms", "12.3 s", "3 min 20 s", "1 h 05 min"]);
});

test("bytes and versions", () => {
  expect(bytes(3 * 2 ** 30)).toBe("3 GiB");
  expect([versions(3, 3), versions(3, 5), versions(null, null)]).toEqual(["3", "3 to 5", "–"]);
});
