"""Drives a headless Chromium through the dashboard: `browse_dashboard.py CHROMIUM URL FOLDER`, in an environment with playwright.

It prints a line after each act, and waits for a line before the next: pages (of every page: title, width and height of what scrolls, a picture in
FOLDER), live (an event came), lost (the server is gone), back (it is there again). Errors of the page's scripts end it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PAGES = (
    "",
    "curves",
    "steps",
    "trajectories",
    "groups",
    "batches",
    "jobs",
    "pushes",
    "events",
    "trajectory/3",
    "trajectory/3?view=tokens",
)
SIZES = {"wide": (1200, 900, "light"), "phone": (390, 800, "dark")}


def main() -> None:
    chromium, url, folder = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        wrong: list[str] = []
        for name, (width, height, scheme) in SIZES.items():
            page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
            page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
            page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
            page.goto(url)
            seen = [
                look(page, one, Path(folder) / f"{name}-{one.replace('/', '-').replace('?', '-') or 'overview'}.png")
                for one in PAGES
            ]
            print(json.dumps({"size": name, "pages": seen, "wrong": wrong}), flush=True)
        page.goto(page.url.partition("#")[0] + "#/")
        wait(page, "main[aria-busy=false] h1", "opened")
        page.get_by_text("planted.event").wait_for(timeout=20_000)
        say("live")
        page.get_by_text("not live").wait_for(timeout=20_000)
        say("lost")
        page.get_by_text("not live").wait_for(state="hidden", timeout=30_000)
        page.keyboard.press("Tab")
        say("back", focus=page.evaluate("document.activeElement.textContent"), wrong=wrong)
        browser.close()


def look(page: Page, path: str, picture: Path) -> dict[str, object]:
    page.evaluate("path => { location.hash = '#/' + path; }", path)
    page.wait_for_function(
        "path => location.hash === '#/' + path && document.getElementById('main').getAttribute('aria-busy') === 'false'",
        arg=path,
    )
    page.wait_for_selector("main h1")
    page.screenshot(path=picture, full_page=True)
    return {
        "path": path,
        "title": page.title(),
        "width": page.evaluate("document.documentElement.scrollWidth"),
        "text": page.inner_text("main"),
    }


def wait(page: Page, selector: str, act: str) -> None:
    page.wait_for_selector(selector)
    print(json.dumps({"act": act}), flush=True)


def say(act: str, **more: object) -> None:
    print(json.dumps({"act": act} | more), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
