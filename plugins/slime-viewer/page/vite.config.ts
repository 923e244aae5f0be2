import { readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

/** Packages whose code is in the bundle: their licenses require their text beside it. */
const BUNDLED = ["@preact/signals", "@preact/signals-core", "preact", "uplot"];

function licenses(): Plugin {
  return {
    name: "licenses",
    generateBundle() {
      const texts = BUNDLED.map((name) => {
        const folder = new URL(`node_modules/${name}/`, import.meta.url);
        const { version } = JSON.parse(readFileSync(new URL("package.json", folder), "utf-8")) as { version: string };
        return `${name} ${version}\n\n${readFileSync(new URL("LICENSE", folder), "utf-8").trim()}\n`;
      });
      this.emitFile({ type: "asset", fileName: "assets/licenses.txt", source: texts.join("\n\n") });
    },
  };
}

// Names without hashes, and no date or path in any file: the same sources give the same bytes, which CI compares.
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  plugins: [licenses()],
  // `npm run dev` shows the sources over the data of `slime view RUN --page --no-browser --port 8000`.
  server: { proxy: { "/api": "http://127.0.0.1:8000", "/panels": "http://127.0.0.1:8000" } },
  build: {
    outDir: "../src/slime_viewer/static",
    emptyOutDir: true,
    target: "es2023",
    assetsInlineLimit: 0,
    modulePreload: false,
    cssCodeSplit: false,
    rolldownOptions: {
      output: {
        entryFileNames: "assets/page.js",
        chunkFileNames: "assets/[name].js",
        assetFileNames: "assets/page[extname]",
        codeSplitting: false,
      },
    },
  },
});
