/** The keys of the page, and what the colors and words mean. */

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { shortcuts } from "./keyboard";

export const helpOpen = signal(false);

export function Help() {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (helpOpen.value) dialog.current?.showModal();
    else dialog.current?.close();
  }, [helpOpen.value]);
  const seen = new Set<string>();
  const listed = shortcuts.value.toReversed().filter(({ keys }) => !seen.has(keys) && seen.add(keys));
  return (
    <dialog
      ref={dialog}
      aria-labelledby="keys"
      onClose={() => (helpOpen.value = false)}
      onClick={(event) => event.target === dialog.current && (helpOpen.value = false)}
    >
      <div class="dialog">
        <h2 id="keys">Keys</h2>
        <dl class="keys">
          {listed.toReversed().map(({ keys, title }) => (
            <div key={keys}>
              <dt>
                {keys.split(" ").map((key, place) => (
                  <kbd key={place}>{KEY_NAMES[key] ?? key}</kbd>
                ))}
              </dt>
              <dd>{title}</dd>
            </div>
          ))}
          <div>
            <dt>
              <kbd>←</kbd>
              <kbd>→</kbd>
              <kbd>↑</kbd>
              <kbd>↓</kbd>
            </dt>
            <dd>in a response: from token to token, by ten</dd>
          </div>
        </dl>
        <p class="quiet">The address in the browser holds the whole view: copy it to share what you see.</p>
        <button type="button" onClick={() => (helpOpen.value = false)}>
          Close
        </button>
      </div>
    </dialog>
  );
}

const KEY_NAMES: Record<string, string> = { ArrowLeft: "←", ArrowRight: "→" };
