"""Makes docs/pages.png, the page of a job that is done: `python -m tests.service.screenshot`. Needs chromium."""

import json
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from reflogp_client import Client
from reflogp_client.cli.demo_model import build_model
from tests.conftest import PAIRS, REPOSITORY, write_rows
from tests.service.serving import serving
from tests.service.test_pages import CHROMIUM, FLAGS, config_file, finished, many_rows

PICTURE = REPOSITORY / "docs" / "pages.png"
ROWS = 300


def main() -> None:
    """Train the demo's model, score a dataset with it in a service, take the picture."""
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_model(folder / "model", [row["prompt"] + row["chosen"] for row in rows])
        data = write_rows(folder / "gsm8k_pairs.jsonl", many_rows(rows, ROWS, "Question"))
        with serving("--config", config_file(folder, folder / "model")) as url, Client(url) as client:
            job = client.submit(data, "tiny", max_length=1024, title="GSM8K pairs").id
            state = finished(url, job, patience=600)
            assert state == "done", state
            take(f"{url}/jobs/{job}")
    print(PICTURE)


def take(page_url: str) -> None:
    """The whole page, 1,200 pixels wide."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="light")
        page.goto(page_url)
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
