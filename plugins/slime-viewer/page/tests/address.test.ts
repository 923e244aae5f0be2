import { expect, test } from "vitest";
import { type Address, changed, formatAddress, joined, list, oneOf, parseAddress, takeToken, whole, within } from "../src/address";

test.each<Address>([
  { view: "curves", query: {} },
  { view: "rollouts", query: { run: "a run, with %25 & = # ?", step: "12", where: "reward<0.5 status=truncated" } },
  { view: "panel/über/ed", query: { q: '"</script>" +1' } },
])("an address comes back as it was: $view", (address) => {
  expect(parseAddress(formatAddress(address))).toEqual(address);
});

test("one state has one address", () => {
  const one = formatAddress({ view: "curves", query: { x: "hours", filter: "kl" } });
  const other = formatAddress({ view: "curves", query: { filter: "kl", y: "", x: "hours" } });
  expect(one).toBe(other);
});

test("nothing after # is the first view", () => {
  for (const hash of ["", "#", "#/"]) expect(parseAddress(hash)).toEqual({ view: "curves", query: {} });
});

test("a broken escape is text, not an exception", () => {
  expect(parseAddress("#/%E0%A4%A").view).toBe("%E0%A4%A");
});

test("changes replace and remove keys", () => {
  expect(changed({ step: "3", q: "x" }, { step: 4, q: null, sort: "reward", where: "" })).toEqual({ step: "4", sort: "reward" });
});

test("names with commas survive a list", () => {
  const runs = ["a", "b,c", "50%2C"];
  const back = parseAddress(formatAddress({ view: "curves", query: { over: joined(runs) } }));
  expect(list(back.query, "over")).toEqual(runs);
});

test("values outside of what is known become the default", () => {
  expect(whole({ step: "12" }, "step")).toBe(12);
  expect(whole({ step: "1e9" }, "step")).toBeNull();
  expect(within({ smooth: "7" }, "smooth", 0, 0.99, 0)).toBe(0);
  expect(oneOf({ x: "other" }, "x", ["step", "hours"])).toBe("step");
});

test.each([
  ["#token=abc", "abc", ""],
  ["#/curves?run=a&token=abc", "abc", "#/curves?run=a"],
  ["#/curves?token=abc&run=a", "abc", "#/curves?run=a"],
  ["#/sample?place=3&mytoken=x", null, "#/sample?place=3&mytoken=x"],
])("the token leaves the address: %s", (hash, token, rest) => {
  expect(takeToken(hash)).toEqual({ token, hash: rest });
});
