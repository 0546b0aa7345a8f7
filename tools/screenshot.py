"""Make docs/pages.png, the page of a finished job, and docs/report.png, a report: `python -m tools.screenshot`.

Needs chromium.
"""

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from reflogp.cli.demo_model import build_model
from reflogp.client import Client
from tests.conftest import PAIRS, REPOSITORY, write_rows
from tests.service.serving import serving
from tests.service.test_pages import CHROMIUM, FLAGS, config_file, finished, many_rows

PAGE, REPORT = REPOSITORY / "docs" / "pages.png", REPOSITORY / "docs" / "report.png"
ROWS = 300


def main() -> None:
    """Train the demo's model, score a dataset with it in a service, and save the pictures."""
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_model(folder / "model", [row["prompt"] + row["chosen"] for row in rows])
        data = write_rows(folder / "gsm8k_pairs.jsonl", many_rows(rows, ROWS, "Question"))
        with serving("--config", config_file(folder, folder / "model")) as url, Client(url) as client:
            job = client.submit(data, "tiny", max_length=1024, title="GSM8K pairs").id
            state = finished(url, job, patience=600)
            assert state == "done", state
            take(f"{url}/jobs/{job}", PAGE)
        take_report(folder / "model", PAIRS, folder / "report")
    print(PAGE, REPORT)


def take_report(model: Path, data: Path, folder: Path) -> None:
    """Score the shipped pairs and write their report; in the picture, the first outlier is open."""
    command = [sys.executable, "-c", "from reflogp.cli import main; main()"]
    options = [str(model), str(data), "--store", str(folder / "store"), "--dtype", "float32"]
    subprocess.run([*command, "score", *options], check=True)
    subprocess.run([*command, "report", *options, "--max-length", "256", "-o", str(folder / "page")], check=True)
    take((folder / "page" / "index.html").as_uri(), REPORT, "details.example summary", "#repeats")


def take(page_url: str, picture: Path, pressed: str | None = None, end: str | None = None) -> None:
    """Click an element and save a picture of the page from its top to another element, with 1,200 pixels and 128 colours."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="light")
        page.goto(page_url)
        if pressed:
            page.locator(pressed).first.click()
        size = page.locator("html").bounding_box()
        height = page.locator(end).bounding_box()["y"] + page.evaluate("scrollY") if end else size["height"]
        shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": 1200, "height": height})
        browser.close()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    main()
