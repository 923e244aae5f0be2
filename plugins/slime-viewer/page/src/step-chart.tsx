/** A strip of one number for each step; a click opens a step. */

import { useMemo } from "preact/hooks";
import { Chart } from "./chart";
import { describe } from "./curves";
import { grouped, short } from "./number-format";
import { seriesColor } from "./palette";
import { theme } from "./theme";

export function StepChart({
  title,
  steps,
  values,
  current,
  onStep,
}: {
  title: string;
  steps: readonly number[];
  values: readonly (number | null)[];
  current: number | null;
  onStep(step: number): void;
}) {
  const lines = useMemo(() => [{ title, color: seriesColor(0, theme.value), mark: "", x: steps, y: values }], [title, steps, values, theme.value]);
  const breaks = useMemo(() => (current === null ? [] : [current]), [current]);
  const at = current === null ? -1 : steps.indexOf(current);
  return (
    <figure class="strip">
      <figcaption>
        {title}
        {at >= 0 ? (
          <span class="value">
            step {grouped(current!)}: {short(values[at])}
          </span>
        ) : null}
      </figcaption>
      <Chart
        lines={lines}
        breaks={breaks}
        xTitle="step"
        height={84}
        theme={theme.value}
        group="strip"
        label={describe(title, lines)}
        onClick={(x) => {
          const nearest = steps.reduce((best, step) => (Math.abs(step - x) < Math.abs(best - x) ? step : best));
          onStep(nearest);
        }}
      />
    </figure>
  );
}
