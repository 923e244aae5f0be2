/** Light or dark: as the system has it, or as chosen. */

import { computed, effect, signal } from "@preact/signals";
import type { Theme } from "./palette";

export type Choice = "system" | Theme;

const KEY = "slime-view-theme";
const CHOICES: readonly Choice[] = ["system", "light", "dark"];

const system = matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);
system.addEventListener("change", () => {
  systemDark.value = system.matches;
});

export const themeChoice = signal<Choice>(read());
export const theme = computed<Theme>(() => (themeChoice.value === "system" ? (systemDark.value ? "dark" : "light") : themeChoice.value));

export function nextTheme(): void {
  themeChoice.value = CHOICES[(CHOICES.indexOf(themeChoice.value) + 1) % CHOICES.length]!;
  try {
    localStorage.setItem(KEY, themeChoice.value);
  } catch {
    // The choice then holds until the page is closed.
  }
}

/** Style sheets read `data-theme` of the root. */
export function applyTheme(): void {
  effect(() => {
    document.documentElement.dataset.theme = theme.value;
  });
}

function read(): Choice {
  try {
    return CHOICES.find((choice) => choice === localStorage.getItem(KEY)) ?? "system";
  } catch {
    return "system";
  }
}
