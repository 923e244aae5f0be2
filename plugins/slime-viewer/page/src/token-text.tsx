/**
 * The response, token by token. A response may have a hundred thousand tokens: their elements are made once, without the framework, and
 * only their classes change with the coloring. Every text is a text node.
 */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { whole } from "./address";
import type { Sample, TokenColumn, Turn } from "./api";
import { useShortcuts } from "./keyboard";
import { adjust, query } from "./navigation";
import { grouped, short } from "./number-format";
import { kindText } from "./token-legend";
import { classOf, extremes, type Scale } from "./token-scale";

/** A block that the browser leaves out while it is off the screen has at least so many tokens, and ends at an end of a line. */
const BLOCK = 400;
/** Milliseconds after which the token of the keyboard is in the address. */
const SETTLED = 300;
/** Tokens that "next notable token" visits: at most so many, and at most one in ten. */
const NOTABLE = 20;

export function TokenText({ sample, column, scale, numbers }: { sample: Sample; column: TokenColumn | undefined; scale: Scale | null; numbers: boolean }) {
  const { tokens, turns } = sample;
  if (tokens.text === null) return <PlainTurns turns={turns} />;
  return <ColoredTurns sample={sample} texts={tokens.text} column={column} scale={scale} numbers={numbers} />;
}

/** Without a tokenizer there are no tokens to color. */
function PlainTurns({ turns }: { turns: readonly Turn[] }) {
  return (
    <>
      {turns.map((turn) => (
        <div key={turn.start} class={`message ${turn.by}`}>
          <TurnTitle turn={turn} />
          <pre>{turn.text}</pre>
        </div>
      ))}
    </>
  );
}

function TurnTitle({ turn }: { turn: Turn }) {
  return (
    <span class="role">
      {turn.by === "policy" ? (turn.version === null ? "policy" : `policy, version ${turn.version}`) : "environment"},{" "}
      <span class="quiet">
        tokens {grouped(turn.start)} to {grouped(turn.end)}
      </span>
    </span>
  );
}

function ColoredTurns({ sample, texts, column, scale, numbers }: { sample: Sample; texts: readonly string[]; column: TokenColumn | undefined; scale: Scale | null; numbers: boolean }) {
  const hosts = useRef<(HTMLDivElement | null)[]>([]);
  const elements = useRef<HTMLElement[]>([]);
  const [shown, setShown] = useState<{ place: number; by: "pointer" | "keyboard" } | null>(null);
  const active = useRef(0);
  const { turns } = sample;
  const settle = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const notable = useMemo(() => (column ? extremes(column, Math.max(1, Math.min(NOTABLE, Math.floor(texts.length / 10)))) : []), [column]);

  useEffect(() => {
    elements.current = [];
    turns.forEach((turn, at) => {
      const host = hosts.current[at];
      if (host) host.replaceChildren(...blocksOf(turn, texts, elements.current));
    });
    active.current = 0;
    elements.current[0]?.setAttribute("tabindex", "0");
    setShown(null);
    const linked = whole(query.peek(), "place");
    if (linked !== null) moveTo(linked, "center");
    return () => clearTimeout(settle.current);
  }, [sample]);

  useEffect(() => {
    elements.current.forEach((element, place) => {
      if (!element) return;
      const value = column?.values[place];
      const classes = scale ? classOf(value, scale) : "";
      element.className = value !== null && value !== undefined && value < 0 && scale?.kind === "diverging" ? `${classes} minus` : classes;
      if (numbers && value !== null && value !== undefined) element.dataset.number = column!.name === "mask" ? String(value) : short(value);
      else delete element.dataset.number;
    });
  }, [sample, column, scale, numbers]);

  const moveTo = (place: number, block: ScrollLogicalPosition = "nearest") => {
    const next = elements.current[place];
    if (!next) return;
    elements.current[active.current]?.setAttribute("tabindex", "-1");
    active.current = place;
    next.setAttribute("tabindex", "0");
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block });
    setShown({ place, by: "keyboard" });
    clearTimeout(settle.current);
    settle.current = setTimeout(() => adjust({ place }, { replace: true }), SETTLED);
  };
  const step = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") setShown(null);
    if (by === undefined) return;
    event.preventDefault();
    moveTo(Math.min(elements.current.length - 1, Math.max(0, active.current + by)));
  };
  useShortcuts([
    { keys: "e", title: "next notable token (largest numbers)", run: () => notable.length > 0 && moveTo(notable.find((place) => place > active.current) ?? notable[0]!, "center") },
    { keys: "E", title: "notable token before", run: () => notable.length > 0 && moveTo(notable.findLast((place) => place < active.current) ?? notable[notable.length - 1]!, "center") },
  ]);

  return (
    <div
      class="tokens"
      role="group"
      aria-label="Tokens of the response; arrow keys move from token to token"
      onKeyDown={step}
      onPointerOver={(event) => {
        const place = placeOf(event.target);
        if (place !== null) setShown({ place, by: "pointer" });
      }}
      onPointerLeave={() => setShown(null)}
      onFocusIn={(event) => {
        const place = placeOf(event.target);
        if (place !== null) setShown({ place, by: "keyboard" });
      }}
      onFocusOut={() => setShown(null)}
      onClick={(event) => {
        const place = placeOf(event.target);
        // A selection of text must not be lost to the keyboard's place.
        if (place !== null && getSelection()?.isCollapsed !== false) moveTo(place);
      }}
    >
      {turns.map((turn, at) => (
        <div key={`${sample.at.step}/${sample.at.index}/${sample.at.part}/${turn.start}`} class={`message ${turn.by}`}>
          <TurnTitle turn={turn} />
          <div
            class="text"
            ref={(host: HTMLDivElement | null) => {
              hosts.current[at] = host;
            }}
          />
        </div>
      ))}
      {shown && elements.current[shown.place] ? <TokenCard sample={sample} place={shown.place} anchor={elements.current[shown.place]!} current={column?.name} spoken={shown.by === "keyboard"} /> : null}
    </div>
  );
}

function placeOf(target: EventTarget | null): number | null {
  const text = target instanceof HTMLElement ? target.dataset.place : undefined;
  return text === undefined ? null : Number(text);
}

function blocksOf(turn: Turn, texts: readonly string[], elements: HTMLElement[]): HTMLElement[] {
  const blocks: HTMLElement[] = [];
  let block: HTMLElement | null = null;
  for (let place = turn.start; place < turn.end; place++) {
    if (block === null) {
      block = document.createElement("div");
      blocks.push(block);
    }
    const text = texts[place] ?? "";
    const element = document.createElement("span");
    element.textContent = text;
    element.dataset.place = String(place);
    element.setAttribute("tabindex", "-1");
    elements[place] = element;
    block.append(element);
    if (block.childElementCount >= BLOCK && text.endsWith("\n")) block = null;
  }
  return blocks;
}

const CARD_WIDTH = 260;

/** All numbers of a token, below it. */
function TokenCard({ sample, place, anchor, current, spoken }: { sample: Sample; place: number; anchor: HTMLElement; current: string | undefined; spoken: boolean }) {
  const { ids, text, columns } = sample.tokens;
  const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - CARD_WIDTH - 8));
  const rows = columns.filter(({ values }) => values[place] !== null && values[place] !== undefined);
  const below = box.bottom + 40 + rows.length * 18 < innerHeight;
  return (
    <div
      class="card"
      role={spoken ? "status" : "tooltip"}
      style={{ left: `${left}px`, width: `${CARD_WIDTH}px`, ...(below ? { top: `${box.bottom + 6}px` } : { bottom: `${innerHeight - box.top + 6}px` }) }}
    >
      <p>
        <code>{visible(text?.[place] ?? "")}</code>{" "}
        <span class="quiet">
          token {grouped(place)}, id {ids[place]}
        </span>
      </p>
      <dl>
        {rows.map(({ name, title, scale, values }) => (
          <div key={name} class={name === current ? "current" : ""}>
            <dt>{title}</dt>
            <dd>{scale === "category" ? kindText(name, values[place]!) : short(values[place])}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

/** White space as signs. */
function visible(text: string): string {
  return text === "" ? "(part of a character)" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}
