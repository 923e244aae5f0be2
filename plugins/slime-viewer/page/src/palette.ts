/**
 * Colors of series and of times. They differ for eyes with any color blindness (after Okabe and Ito), on white and on near-black.
 * Color is never alone: lines have their number at the end, spans of the timeline their name.
 */

export type Theme = "light" | "dark";

const SERIES: Record<Theme, readonly string[]> = {
  light: ["#0868ac", "#c2500a", "#00815e", "#a8437c", "#8a6500", "#5b4bb5", "#4a6a7c", "#9c2f2f"],
  dark: ["#5fb3ec", "#f08c4a", "#3cc79d", "#e08bbd", "#dcb53c", "#a99bf5", "#9db8c6", "#ee8080"],
};

/** The color of a run's lines; after eight they repeat, and the numbers are what differs. */
export function seriesColor(place: number, theme: Theme): string {
  const colors = SERIES[theme];
  return colors[place % colors.length]!;
}

/** The same color, let through: `alpha` from 0 to 1. */
export function translucent(color: string, alpha: number): string {
  return color + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

interface Look {
  light: string;
  dark: string;
  /** What the legend and the table call it. */
  title: string;
  /** Drawn with stripes: time in which nothing is done. */
  striped?: boolean;
}

/** Kinds of spans in the timeline. */
const KINDS: Record<string, Look> = {
  rollout: { light: "#7fb7e0", dark: "#2f6f9f", title: "rollout" },
  score: { light: "#d9b3dc", dark: "#7d4f86", title: "score" },
  train: { light: "#f2b27a", dark: "#a8602a", title: "train" },
  weights: { light: "#7fcdb4", dark: "#1f7d62", title: "weight update" },
  eval: { light: "#e3d37a", dark: "#7d6d1a", title: "evaluation" },
  save: { light: "#b9b2f0", dark: "#5a4fa8", title: "checkpoint" },
  sleep: { light: "#b8c4cc", dark: "#4b5a64", title: "sleep" },
  wake: { light: "#d3dce2", dark: "#62727c", title: "wake up" },
  wait: { light: "#eceff1", dark: "#23292d", title: "waiting", striped: true },
  driver: { light: "#d9cfc1", dark: "#5d5344", title: "driver starts" },
  imports: { light: "#cfe0c3", dark: "#4d6340", title: "imports" },
  load: { light: "#b6d7a8", dark: "#3f6b33", title: "load" },
  graphs: { light: "#e6b8c9", dark: "#7d4560", title: "graphs" },
  restart: { light: "#f0a0a0", dark: "#9c3b3b", title: "restart" },
};

export function kindColor(kind: string, theme: Theme): string {
  return KINDS[kind]?.[theme] ?? (theme === "light" ? "#c8c8c8" : "#555555");
}

export function kindTitle(kind: string): string {
  return KINDS[kind]?.title ?? kind;
}

export function isStriped(kind: string): boolean {
  return KINDS[kind]?.striped ?? false;
}

/** Kinds in the order of the legend. */
export function kindOrder(kinds: Iterable<string>): string[] {
  const known = Object.keys(KINDS);
  const rank = (kind: string) => (known.includes(kind) ? known.indexOf(kind) : known.length);
  return [...new Set(kinds)].sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
}
