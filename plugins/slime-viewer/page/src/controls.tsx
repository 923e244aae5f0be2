/** Inputs that several views have. */

import { useEffect, useId, useRef, useState } from "preact/hooks";

/** One of a few choices, as buttons side by side. */
export function Choices<Choice extends string>({
  label,
  choices,
  value,
  onChange,
}: {
  label: string;
  choices: readonly (readonly [Choice, string])[];
  value: Choice;
  onChange(choice: Choice): void;
}) {
  return (
    <div class="choices" role="group" aria-label={label}>
      <span class="label">{label}</span>
      {choices.map(([choice, title]) => (
        <button key={choice} type="button" aria-pressed={choice === value} onClick={() => onChange(choice)}>
          {title}
        </button>
      ))}
    </div>
  );
}

export function Select({
  label,
  value,
  choices,
  onChange,
}: {
  label: string;
  value: string;
  choices: readonly (readonly [string, string])[];
  onChange(value: string): void;
}) {
  return (
    <label class="field">
      <span class="label">{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {choices.map(([choice, title]) => (
          <option key={choice} value={choice}>
            {title}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Milliseconds after the last key until the text counts. */
const PAUSE = 250;

/** A text that counts while it is typed. `focusKey`: the id by which `/` finds it. */
export function TextField({
  label,
  value,
  placeholder,
  wide = false,
  main = false,
  onChange,
}: {
  label: string;
  value: string;
  placeholder: string;
  wide?: boolean;
  /** The one that `/` puts the cursor into. */
  main?: boolean;
  onChange(value: string): void;
}) {
  const [text, setText] = useState(value);
  const sent = useRef(value);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const id = useId();
  useEffect(() => {
    // "Back", or a link, changed it; what is being typed has priority.
    if (value !== sent.current) {
      sent.current = value;
      setText(value);
    }
  }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const send = (next: string) => {
    clearTimeout(timer.current);
    if (next === sent.current) return;
    sent.current = next;
    onChange(next);
  };
  return (
    <label class={wide ? "field wide" : "field"} for={id}>
      <span class="label">{label}</span>
      <input
        id={id}
        type="search"
        value={text}
        placeholder={placeholder}
        autocomplete="off"
        spellcheck={false}
        data-main={main ? "" : undefined}
        onInput={(event) => {
          const next = event.currentTarget.value;
          setText(next);
          clearTimeout(timer.current);
          timer.current = setTimeout(() => send(next), PAUSE);
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter") send(event.currentTarget.value);
          if (event.key === "Escape") event.currentTarget.blur();
        }}
      />
    </label>
  );
}

/** What `/` does. */
export function focusMainField(): void {
  const field = document.querySelector<HTMLInputElement>("input[data-main]");
  field?.focus();
  field?.select();
}
