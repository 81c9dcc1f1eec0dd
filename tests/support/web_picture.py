"""The picture of the page in docs/web.md and the README: python tests/support/web_picture.py --write

A simulated node, real jobs, Debian's Chromium and playwright.  Writes docs/web.png, at most 200 KB.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from nodes import Gpuguard
from web_pages import a_busy_node, a_page

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "web.png"
MOST_BYTES = 200_000
CHART_SECONDS = 60  # until the chart of one minute is full


def main() -> None:
    from playwright.sync_api import sync_playwright

    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as place:
        gpuguard = Gpuguard(Path(place), None)
        gpuguard("sim", "start", "8xH100-80GB")
        with a_busy_node(gpuguard), a_page(gpuguard) as port, sync_playwright() as player:
            browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            options: Any = {"viewport": {"width": 1420, "height": 1400}, "locale": "en-US", "color_scheme": "dark"}
            tab = browser.new_context(**options).new_page()
            tab.goto(f"http://127.0.0.1:{port}/")
            tab.wait_for_selector("#chart canvas")
            tab.click("#spans a:first-child")
            gpuguard("sim", "set", "--device", "4", "--utilization", "95%..30%", "--over", "60s")
            gpuguard("sim", "set", "--device", "3", "--utilization", "0%..60%", "--over", "90s")
            tab.wait_for_timeout(CHART_SECONDS * 1000)
            bottom = tab.evaluate("document.getElementById('week-title').getBoundingClientRect().top")
            picture = tab.screenshot(clip={"x": 0, "y": 0, "width": 1420, "height": bottom})
            browser.close()
    if len(picture) > MOST_BYTES:
        sys.exit(f"{len(picture)} bytes: the picture may have {MOST_BYTES}")
    PICTURE.write_bytes(picture)


if __name__ == "__main__":
    main()
