/** What the colors of tokens mean, with the ends of the scale as numbers. */

import type { TokenColumn } from "./api";
import { short } from "./number-format";
import { CATEGORIES, classOf, DIVERGING_STEPS, type Scale, SEQUENTIAL_STEPS } from "./token-scale";

/** Kinds that the legend names; more are only shown on the tokens. */
const NAMED = 8;

export function Legend({ column, scale }: { column: TokenColumn; scale: Scale }) {
  if (scale.kind === "category") {
    const kinds = [...new Set(column.values.filter((value) => value !== null))].sort((one, other) => one - other);
    return (
      <span class="legend">
        {kinds.slice(0, NAMED).map((kind) => (
          <span key={kind} class={`swatch ${classOf(kind, scale)}`}>
            {kindText(column.name, kind)}
          </span>
        ))}
        {kinds.length > NAMED ? <span class="quiet">and {kinds.length - NAMED} more</span> : null}
        {kinds.length > CATEGORIES ? <span class="quiet">colors repeat</span> : null}
      </span>
    );
  }
  if (scale.low === scale.high) return <span class="legend">all {short(scale.low)}</span>;
  const steps = scale.kind === "diverging" ? DIVERGING_STEPS : SEQUENTIAL_STEPS;
  const letter = scale.kind === "diverging" ? "d" : "s";
  const [first, last] = scale.reversed ? [scale.high, scale.low] : [scale.low, scale.high];
  return (
    <span class="legend" role="img" aria-label={`Colors from ${short(first)} to ${short(last)}`}>
      {short(first)}
      <span class="ramp">
        {Array.from({ length: steps }, (_, step) => (
          <span key={step} class={`${letter}${step}`} />
        ))}
      </span>
      {short(last)}
    </span>
  );
}

export function kindText(name: string, kind: number): string {
  if (name === "mask") return kind === 1 ? "trained" : "not trained";
  return name === "version" ? `version ${kind}` : String(kind);
}
