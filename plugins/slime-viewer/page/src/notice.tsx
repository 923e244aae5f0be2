/** Sentences in place of what is not there. */

import type { ComponentChildren } from "preact";

export function Notice({ children, problem = false }: { children: ComponentChildren; problem?: boolean }) {
  return (
    <p class={problem ? "notice problem" : "notice"} role={problem ? "alert" : undefined}>
      {problem ? <strong>Problem: </strong> : null}
      {children}
    </p>
  );
}

/** While the first reply is on its way. */
export function Waiting() {
  return (
    <p class="notice" role="status">
      Loading …
    </p>
  );
}
