/** Tables of columns: headings sort, numbers line up, the first column stays where a narrow screen scrolls. */

import type { ComponentChildren } from "preact";
import { useShortcuts } from "./keyboard";
import { decimalsOf, fixed } from "./number-format";

export interface Column {
  key: string;
  title: string;
  /** A sentence, shown on hover. */
  hint?: string;
  /** Value of the parameter `sort`; without one the column does not sort. */
  sort?: string;
  /** What the first click gives. */
  descendingFirst?: boolean;
  kind: "number" | "text";
  cell(row: number): ComponentChildren;
}

export interface Sorting {
  sort: string;
  descending: boolean;
  hrefOf(sort: string, descending: boolean): string;
}

export function Table({
  label,
  columns,
  rows,
  sorting,
  rowKey,
  rowClass,
  pending = false,
}: {
  label: string;
  columns: readonly Column[];
  rows: number;
  sorting?: Sorting;
  rowKey(row: number): string;
  rowClass?(row: number): string | undefined;
  pending?: boolean;
}) {
  useShortcuts([
    { keys: "j", title: "next row", run: () => moveRow(1) },
    { keys: "k", title: "row before", run: () => moveRow(-1) },
  ]);
  return (
    <div class={pending ? "table pending" : "table"} role="region" aria-label={label} aria-busy={pending} tabIndex={0}>
      <table>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.key} scope="col" class={column.kind} title={column.hint} aria-sort={ariaSort(column, sorting)}>
                {column.sort && sorting ? <Heading column={column} sorting={sorting} /> : column.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {Array.from({ length: rows }, (_, row) => (
            <tr key={rowKey(row)} class={rowClass?.(row)}>
              {columns.map((column) => (
                <td key={column.key} class={column.kind}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Heading({ column, sorting }: { column: Column; sorting: Sorting }) {
  const active = sorting.sort === column.sort;
  const descending = active ? !sorting.descending : (column.descendingFirst ?? false);
  return (
    <a href={sorting.hrefOf(column.sort!, descending)}>
      {column.title}
      <span class="arrow" aria-hidden="true">
        {active ? (sorting.descending ? "▾" : "▴") : ""}
      </span>
    </a>
  );
}

function ariaSort(column: Column, sorting: Sorting | undefined): "ascending" | "descending" | undefined {
  if (!sorting || !column.sort || sorting.sort !== column.sort) return undefined;
  return sorting.descending ? "descending" : "ascending";
}

/** Puts the keyboard on the link of the next row. */
function moveRow(by: number): void {
  const links = [...document.querySelectorAll<HTMLAnchorElement>("a.row")];
  const at = links.findIndex((link) => link === document.activeElement);
  const next = links[at < 0 ? (by > 0 ? 0 : links.length - 1) : at + by];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

/** A column of numbers with equal decimals; null where no row has one. */
export function numberColumn(column: Omit<Column, "kind" | "cell">, values: readonly (number | null)[] | undefined): Column | null {
  if (!values || values.every((value) => value === null)) return null;
  const decimals = decimalsOf(values);
  return { ...column, kind: "number", cell: (row) => fixed(values[row], decimals) };
}

export function present(columns: readonly (Column | null)[]): Column[] {
  return columns.filter((column) => column !== null);
}
