/** Draws a timeline into a canvas. */

import type { Timeline } from "./api";
import { isStriped, kindColor, kindTitle, type Theme } from "./palette";
import { clock, type Rows, ticks } from "./timeline-scale";

/** Pixels of the names of lanes. */
export function leftOf(width: number): number {
  return width < 500 ? 66 : 120;
}
/** Pixels: the axis, one lane. */
export const HEAD = 22;
export const LANE_HEIGHT = 30;
export const BAR = 22;
/** Pixels that a span needs to have its name. */
const LABELED = 11;

const INK: Record<Theme, { text: string; quiet: string; grid: string; mark: string; onBar: string; stripe: string; outline: string }> = {
  light: { text: "#1b2126", quiet: "#59626a", grid: "#eceff1", mark: "#b3261e", onBar: "#1b2126", stripe: "#bcc6cc", outline: "#1b2126" },
  dark: { text: "#e3e7ea", quiet: "#9aa5ad", grid: "#22282d", mark: "#ff8a80", onBar: "#ffffff", stripe: "#3d474e", outline: "#ffffff" },
};

export interface Picture {
  timeline: Timeline;
  rows: Rows;
  start: number;
  end: number;
  width: number;
  height: number;
  theme: Theme;
  /** Span below the pointer; -1: none. */
  pointed: number;
}

export function drawTimeline(canvas: HTMLCanvasElement, picture: Picture): void {
  const { timeline, rows, start, end, width, height, theme } = picture;
  const scale = devicePixelRatio;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const ctx = canvas.getContext("2d")!;
  ctx.scale(scale, scale);
  ctx.font = "11px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  const ink = INK[theme];
  const left = leftOf(width);
  const xOf = (time: number) => left + ((time - start) / (end - start)) * (width - left);

  const at = ticks(start, end, timeline.first, Math.max(2, Math.floor((width - left) / 90)));
  const step = at.length > 1 ? at[1]! - at[0]! : 1;
  ctx.fillStyle = ink.quiet;
  ctx.strokeStyle = ink.grid;
  for (const seconds of at) {
    const x = Math.round(xOf(timeline.first + seconds)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(x, HEAD - 4);
    ctx.lineTo(x, height);
    ctx.stroke();
    ctx.fillText(clock(seconds, step), x + 3, HEAD / 2);
  }

  ctx.save();
  ctx.beginPath();
  ctx.rect(left, 0, width - left, height);
  ctx.clip();
  const stripes = stripePattern(ctx, ink.stripe, scale);
  // Long spans first: what lies inside of others stays visible.
  const order = timeline.lane.map((_, span) => span).sort((one, other) => timeline.to[other]! - timeline.from[other]! - (timeline.to[one]! - timeline.from[one]!));
  for (const span of order) {
    const from = timeline.from[span]!;
    const to = timeline.to[span]!;
    if (to < start || from > end) continue;
    const x = Math.max(xOf(from), left - 2);
    const length = Math.max(Math.min(xOf(to), width + 2) - x, 0.75);
    const tall = BAR / rows.rows[span]!;
    const y = HEAD + timeline.lane[span]! * LANE_HEIGHT + (LANE_HEIGHT - BAR) / 2 + rows.row[span]! * tall;
    const kind = timeline.kind[span]!;
    ctx.fillStyle = kindColor(kind, theme);
    ctx.fillRect(x, y, length, tall);
    if (isStriped(kind) && stripes) {
      ctx.fillStyle = stripes;
      ctx.fillRect(x, y, length, tall);
    }
    if (length > 3) {
      ctx.fillStyle = theme === "light" ? "#ffffff" : "#14181b";
      ctx.fillRect(x + length - 0.75, y, 0.75, tall);
    }
    if (span === picture.pointed) {
      ctx.strokeStyle = ink.outline;
      ctx.strokeRect(x + 0.5, y + 0.5, Math.max(length - 1, 1), tall - 1);
    }
    const seen = Math.max(x, left);
    if (tall >= LABELED) label(ctx, kind, timeline.step[span], seen, y + tall / 2, Math.min(x + length, width) - seen, ink.onBar);
  }
  ctx.fillStyle = ink.mark;
  for (const { time } of timeline.marks) {
    const x = xOf(time);
    ctx.beginPath();
    ctx.moveTo(x - 4, HEAD - 8);
    ctx.lineTo(x + 4, HEAD - 8);
    ctx.lineTo(x, HEAD - 1);
    ctx.fill();
    ctx.fillRect(x - 0.5, HEAD - 1, 1, height - HEAD);
  }
  ctx.restore();

  timeline.lanes.forEach(({ name, devices }, lane) => {
    const y = HEAD + lane * LANE_HEIGHT + LANE_HEIGHT / 2;
    ctx.fillStyle = ink.text;
    // Where there is no room for "trainer: critic", "critic" is what differs.
    const words = name.split(": ");
    const whole = ctx.measureText(name).width <= left - 8;
    ctx.fillText(fitted(ctx, whole ? name : words[words.length - 1]!, left - 8), 0, devices ? y - 6 : y);
    ctx.fillStyle = ink.quiet;
    if (devices) ctx.fillText(fitted(ctx, devices, left - 8), 0, y + 7);
  });
}

/** Name and step, as far as they fit. */
function label(ctx: CanvasRenderingContext2D, kind: string, step: number | null | undefined, x: number, middle: number, length: number, color: string): void {
  if (length < 26) return;
  const title = kindTitle(kind);
  const long = step !== null && step !== undefined ? `${title} ${step}` : title;
  const text = [long, title].find((candidate) => ctx.measureText(candidate).width < length - 8);
  if (text === undefined) return;
  ctx.fillStyle = color;
  ctx.fillText(text, x + 4, middle + 0.5);
}

function fitted(ctx: CanvasRenderingContext2D, text: string, width: number): string {
  if (ctx.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && ctx.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return `${text.slice(0, end)}…`;
}

function stripePattern(ctx: CanvasRenderingContext2D, color: string, scale: number): CanvasPattern | null {
  const tile = document.createElement("canvas");
  const side = Math.round(6 * scale);
  tile.width = tile.height = side;
  const on = tile.getContext("2d")!;
  on.strokeStyle = color;
  on.lineWidth = scale;
  for (const shift of [-side, 0, side]) {
    on.beginPath();
    on.moveTo(shift, side);
    on.lineTo(shift + side, 0);
    on.stroke();
  }
  const pattern = ctx.createPattern(tile, "repeat");
  pattern?.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}
