/** Which rows of a long table are shown, and links to those before and behind. */

import { grouped } from "./number-format";

export const PAGE_LENGTH = 100;

export function Pages({
  total,
  offset,
  what,
  took,
  below = false,
  exact = true,
  hrefOf,
}: {
  total: number;
  offset: number;
  /** Plural: `groups`. */
  what: string;
  took?: number | undefined;
  /** The second one of a table, behind its last row. */
  below?: boolean;
  /** False: `total` is an estimate. */
  exact?: boolean;
  hrefOf(offset: number): string;
}) {
  const last = Math.min(offset + PAGE_LENGTH, total);
  const earlier = Math.max(0, offset - PAGE_LENGTH);
  return (
    <nav class="pages" aria-label={below ? `Pages of ${what}, below the table` : `Pages of ${what}`}>
      <span role={below ? undefined : "status"}>
        {total === 0 ? `No ${what}` : total <= PAGE_LENGTH && offset === 0 ? `${grouped(total)} ${what}` : `${grouped(offset + 1)}–${grouped(last)} of ${exact ? "" : "about "}${grouped(total)} ${what}`}
        {took !== undefined ? <span class="quiet"> in {grouped(Math.round(took))} ms</span> : null}
      </span>
      {offset > 0 ? (
        <a href={hrefOf(earlier)} rel="prev">
          ‹ previous
        </a>
      ) : null}
      {last < total ? (
        <a href={hrefOf(offset + PAGE_LENGTH)} rel="next">
          next ›
        </a>
      ) : null}
    </nav>
  );
}
