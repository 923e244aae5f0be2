/** Starts the page. */

import { render } from "preact";
import type { Exported } from "./api";
import { App } from "./app";
import { HttpClient } from "./client";
import { ExportedClient } from "./exported-client";
import { listen } from "./keyboard";
import "./page.css";
import { follow, setClient } from "./replies";
import { applyTheme } from "./theme";
import { readToken, token } from "./token";

const embedded = document.getElementById("slime-export");
if (embedded) {
  setClient(new ExportedClient(JSON.parse(embedded.textContent) as Exported));
} else {
  readToken();
  setClient(new HttpClient(() => token.value));
  follow();
}
applyTheme();
listen();
render(<App />, document.getElementById("page")!);
