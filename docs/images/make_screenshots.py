"""The screenshots of `slime view` in README.md and docs/watching.md: `make screenshots`.

For another run: `python docs/images/make_screenshots.py runs/NAME`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from playwright.sync_api import Browser, Page, sync_playwright

HERE: Final = Path(__file__).parent
MOST_BYTES: Final = 150_000
OPTIONS: Final = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-sync",
    "--no-first-run",
    "--no-sandbox",
]
READ_MS: Final = 600_000
"""Milliseconds until all samples have been read, on a machine that does other work too."""
TYPED: Final = 600
"""Milliseconds until what a key did is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screenshot:
    name: str
    address: str
    """Behind `#/`."""
    shows: str
    """A CSS selector: the picture is taken once it is there."""
    keys: tuple[str, ...] = ()
    height: int
    """Pixels."""


WIDTH: Final = 1180
SCREENSHOTS: Final = (
    Screenshot(name="view-curves", address="curves?smooth=0.4", shows=".metric:nth-child(9) canvas", height=640),
    Screenshot(name="view-groups", address="rollouts?desc=1&sort=spread&step=8", shows="a.row", height=560),
    Screenshot(
        name="view-tokens", address="rollouts?step=8", shows="a.row", keys=("w", "c", "c", "c", "c", "e"), height=560
    ),
    Screenshot(name="view-timeline", address="timeline", shows=".timeline canvas", keys=("+", "+"), height=480),
)


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address with its token, while `slime view` runs."""
    command = [str(Path(sys.executable).with_name("slime")), "view", str(run), "--page", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = next((line for line in server.stdout if line.startswith("http")), None)
            if line is None:
                raise SystemExit(f"slime view {run} printed no address")
            yield line.strip()
        finally:
            server.terminate()


def take(browser: Browser, address: str, screenshot: Screenshot) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": screenshot.height}, color_scheme="light")
    page.goto(address)
    page.locator("main").wait_for()
    page.evaluate("address => { location.hash = address }", f"#/{screenshot.address}")
    page.locator(screenshot.shows).first.wait_for()
    for key in screenshot.keys:
        settle(page)
        page.keyboard.press(key)
    settle(page)
    path = HERE / f"{screenshot.name}.png"
    page.screenshot(path=path)
    page.close()
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{path} has {size:,} bytes, more than {MOST_BYTES:,}: make it smaller")


def read_samples(browser: Browser, address: str) -> None:
    """Waits until the server has read the samples of all steps: their rewards are in the pictures."""
    page = browser.new_page()
    page.goto(address)
    page.locator("main").wait_for()
    page.evaluate("() => { location.hash = '#/rollouts?step=all' }")
    page.locator("a.row").first.wait_for()
    page.get_by_text("The search index holds").wait_for(state="detached", timeout=READ_MS)
    page.close()


def settle(page: Page) -> None:
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(TYPED)


def main(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    chromium: Annotated[Path, typer.Option(help="The browser.")] = Path("/usr/bin/chromium"),
) -> None:
    """Write the screenshots beside this script."""
    with served(run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        read_samples(browser, address)
        for screenshot in SCREENSHOTS:
            take(browser, address, screenshot)
        browser.close()


if __name__ == "__main__":
    typer.run(main)
