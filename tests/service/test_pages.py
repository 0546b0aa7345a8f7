"""The pages in a real browser, made by a real service that runs real jobs."""

import itertools
import json
import os
import re
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from reflogp.client import Client, Uploaded
from reflogp.service.models import DatasetSpec
from reflogp.service.routes.pages import dataset_name
from reflogp.store import texts
from tests.conftest import write_rows
from tests.service.serving import float32, running, serving, settings_file, token_rows

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
TOKENS = {"anna": ("token-of-anna", ["read", "score"]), "reader": ("token; of a réader", ["read"])}
SCRIPT, IMAGE = "<script>alert(1)</script>", "<img src=x onerror=alert(2)>"
TITLE = f"pairs </title>{SCRIPT}"
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'self'; base-uri 'none'"
SIGN_IN = {"token": TOKENS["anna"][0]}
SEEDS = itertools.count(1)  # no job has another one's rows
ELSEWHERE = [
    *("//evil.example", "/\\evil.example", "\\\\evil.example", "/a\\..\\evil", "/\t/evil.example", "/\n/evil.example"),
    *("https://evil.example", "javascript:alert(1)", "evil.example", ""),
]


def evil_rows(pair_rows):
    """40 pairs; of row 7 every text is markup, and its completions hardly differ, so a report shows it. Row 11 is no pair."""
    rows = json.loads(json.dumps(pair_rows[:40]))
    rows[7]["prompt"][0]["content"] = SCRIPT
    rows[7]["chosen"][0]["content"] = f"{SCRIPT}{IMAGE}" * 20
    rows[7]["rejected"][0]["content"] = f"{SCRIPT}{IMAGE}" * 20 + "."
    rows[11] = {"prompt": rows[11]["prompt"], "chosen": rows[11]["chosen"], "rejected": None}
    return rows


@pytest.fixture(scope="module")
def chromium():
    if not Path(CHROMIUM).exists() and "CI" not in os.environ:
        pytest.skip(f"{CHROMIUM} is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    """A service without tokens."""
    with serving(
        "--config", settings_file(place, place / "store", {"tiny": float32(reference_folder)}), warm=warm_python
    ) as url:
        yield url


@pytest.fixture(scope="module")
def guarded(reference_folder, tmp_path_factory, warm_python):
    """A service with two tokens, which its log never names."""
    folder = tmp_path_factory.mktemp("guarded")
    file = settings_file(folder, folder / "store", {"tiny": float32(reference_folder)}, TOKENS)
    with running("--config", file, warm=warm_python) as started:
        yield started.url
        log = "".join(started.log)
        for token, _ in TOKENS.values():
            assert token not in log and quote(token, safe="") not in log


@pytest.fixture(scope="module")
def done(service, pair_rows, tmp_path_factory):
    """Id of a job that is done."""
    file = write_rows(tmp_path_factory.mktemp("done") / "pairs.jsonl", evil_rows(pair_rows))
    with Client(service) as client:
        return client.watch(client.submit(file, "tiny", title=TITLE).id, timeout=120).id


@pytest.fixture
def submit(service, tmp_path):
    """Submits so many new pairs, gives the job's id; cancels it in the end."""
    begun = []
    with Client(service) as client:

        def submit(count):
            rows = token_rows(count, seed=next(SEEDS), length=150)
            begun.append(client.submit(write_rows(tmp_path / f"{len(begun)}.jsonl", rows), "tiny").id)
            return begun[-1]

        yield submit
        for job in begun:
            httpx.delete(f"{service}/v1/jobs/{job}")
            client.watch(job, timeout=120)


@contextmanager
def opened(chromium, allowed_errors=(), **options):
    """A page in a browser of its own. Nothing may be said on its console, no script of a dataset may run."""
    said = []
    context = chromium.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    try:
        yield page
    finally:
        context.close()
    assert [line for line in said if not any(allowed in line for allowed in allowed_errors)] == []


@contextmanager
def signed_in(url, who="anna"):
    """A client of HTTP that has the cookie."""
    with httpx.Client(base_url=url, headers={"Origin": url}) as client:
        assert client.post("/signin", data={"token": TOKENS[who][0]}).status_code == 303
        yield client


def signed_in_page(page, url, who):
    page.goto(url)
    page.get_by_label("Token").fill(TOKENS[who][0])
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{url}/")


def paths(job):
    return ["/", "/jobs", "/?state=done", "/?before=unknown", f"/jobs/{job}", "/references", "/jobs/unknown"]


# What a page says


@pytest.mark.slow
@pytest.mark.parametrize("script", [True, False])
def test_a_done_job_shows_its_bad_rows_and_gives_its_result(chromium, service, done, script):
    with opened(chromium, java_script_enabled=script) as page:
        page.goto(f"{service}/jobs/{done}")
        assert page.locator("h1").inner_text() == TITLE
        assert page.locator(".badge").inner_text().split() == ["✓", "done"]
        assert page.locator("#progress-text").inner_text() == "78 of 78 sequences (100%)"
        facts = " ".join(page.locator("main").inner_text().split())
        rate = httpx.get(f"{service}/v1/jobs/{done}").json()["summary"]["tokens_per_second"]
        assert "Sharing gain" in facts and f"Tokens per second (mean) {rate:,.0f}" in facts and "Time left" not in facts
        bad = page.locator("tr", has=page.locator("td", has_text="rejected is null or missing"))
        assert bad.locator("td").all_inner_texts()[1:] == ["1", "11"]
        assert page.locator("#result").get_attribute("href") == f"/v1/jobs/{done}/result"
        with page.expect_download() as download:
            page.locator("#result").click()
        assert Path(download.value.path()).read_bytes()[:4] == b"PAR1"


def test_the_report_is_shown_in_a_sandbox_and_no_dataset_can_run_a_script(chromium, guarded, pair_rows, tmp_path):
    """The page of a dataset whose texts are markup: of a stylesheet, nothing else is loaded or run."""
    with Client(guarded, TOKENS["anna"][0]) as client:
        job = client.watch(client.submit(write_rows(tmp_path / "pairs.jsonl", evil_rows(pair_rows)), "tiny").id).id
    with opened(chromium) as page:
        signed_in_page(page, guarded, "reader")
        page.locator(f"#job-{job}").click()
        page.locator("#report").click()
        page.wait_for_url(f"{guarded}/v1/jobs/{job}/report")
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        answer = page.reload()
        assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
        assert answer.headers["cache-control"] == "no-store" and "text/html" in answer.headers["content-type"]
        assert asked == [page.url]
        assert page.locator("svg.chart").count() == 3 and page.locator("svg.chart").nth(1).locator("rect.bar").count() > 3
        assert page.locator("h1").evaluate("title => getComputedStyle(title).fontFamily") != "serif"
        page.locator("details").evaluate_all("parts => parts.forEach(part => { part.open = true })")
        text = page.locator("main").inner_text()
        assert SCRIPT in text and IMAGE in text and "rejected is null or missing" in text
        assert page.locator("script, main img, a, form, iframe").count() == 0
    assert httpx.get(f"{guarded}/v1/jobs/{job}/report").status_code == 401


@pytest.mark.parametrize("script", [True, False])
def test_the_list_shows_jobs_and_filters_them(chromium, service, done, script):
    with opened(chromium, java_script_enabled=script) as page:
        page.goto(service)
        row = page.locator("tbody tr", has=page.locator(f"#job-{done}"))
        assert TITLE in row.inner_text() and "100% of 78" in row.inner_text() and "1 bad row" in row.inner_text()
        assert row.locator("progress").evaluate("bar => [bar.value, bar.max]") == [78, 78]
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", row.locator("time").get_attribute("datetime"))
        page.locator("#filter-failed").click()
        assert page.locator("tbody tr").count() == 0 and "There are no failed jobs" in page.locator("main").inner_text()
        page.locator("#filter-done").click()
        page.locator(f"#job-{done}").click()
        page.wait_for_url(f"**/jobs/{done}")


def test_older_jobs_are_on_further_pages(chromium, service, done, pair_rows, tmp_path):
    """More jobs than fit on a page; the first of them is only on the last."""
    with Client(service) as client:
        name = client.upload(write_rows(tmp_path / "few.jsonl", pair_rows[:1])).name
        for length in range(200, 260):
            last = client.submit(Uploaded(name), "tiny", max_length=length).id
        client.watch(last, timeout=120)
    with opened(chromium) as page:
        page.goto(f"{service}/?state=done")
        assert page.locator("tbody tr").count() == 50 and page.locator(f"#job-{done}").count() == 0
        page.locator("#older").click()
        page.locator(f"#job-{done}").wait_for()
        page.locator("#newest").click()
        page.locator(f"#job-{last}").wait_for()


def test_the_references_and_what_is_not_there(chromium, service, done):
    [reference] = httpx.get(f"{service}/v1/references").json()["references"]
    with opened(chromium, allowed_errors=["404"]) as page:
        page.goto(f"{service}/references")
        text = page.locator("main").inner_text()
        for expected in ("tiny", reference["reference_id"], f"{reference['sequences']:,}", "KiB", "/store"):
            assert expected in text
        assert page.goto(f"{service}/jobs/{IMAGE}").status == 404
        assert IMAGE in page.locator("main").inner_text()


@pytest.mark.slow
def test_narrow_screens_need_no_sideways_scrolling(chromium, service, done):
    with opened(chromium, allowed_errors=["404"], viewport={"width": 380, "height": 700}, color_scheme="dark") as page:
        for path in paths(done):
            page.goto(f"{service}{path}")
            for summary in page.locator("summary").all():
                summary.click()
            assert page.evaluate("document.documentElement.scrollWidth") <= 380, path


# Live


@pytest.mark.slow
def test_progress_reaches_done_without_a_reload(chromium, service, submit):
    job = submit(600)
    with opened(chromium) as page:
        page.goto(f"{service}/jobs/{job}")
        page.evaluate("window.stayed = true")
        assert page.locator("#cancel").count() == 1
        page.locator(".badge.running").wait_for()
        seen = set()
        while not page.locator(".badge.done").count():
            seen.add(page.evaluate("document.getElementById('progress').value"))
            time.sleep(0.1)
        assert len(seen) > 2, seen
        assert page.locator("#report").count() == 1 and page.locator("#cancel").count() == 0
        page.locator("#live", has_text="The job is done.").wait_for(state="attached")  # said behind the change
        assert page.title().startswith("done")
        assert page.evaluate("window.stayed")


@pytest.mark.slow
def test_the_list_follows_its_jobs(chromium, service, submit):
    with opened(chromium) as page:
        page.goto(service)
        page.evaluate("window.stayed = true")
        job = submit(300)
        row = page.locator("tbody tr", has=page.locator(f"#job-{job}"))
        row.wait_for()
        page.locator(f"#job-{job}").focus()
        row.locator(".badge.done").wait_for()
        assert page.evaluate("[window.stayed, document.activeElement.id]") == [True, f"job-{job}"]


@pytest.mark.slow
def test_without_javascript_a_page_loads_again_until_the_job_is_done(chromium, service, submit):
    job = submit(300)
    with opened(chromium, java_script_enabled=False) as page:
        page.goto(f"{service}/jobs/{job}")
        page.locator(".badge.done").wait_for()
        time.sleep(0.5)
        assert page.locator("meta[http-equiv=refresh]").count() == 0


@pytest.mark.slow
def test_an_empty_list_teaches_and_a_job_is_followed_through_a_restart(chromium, reference_folder, tmp_path, warm_python):
    config = ("--config", settings_file(tmp_path, tmp_path / "store", {"tiny": float32(reference_folder)}))
    file = write_rows(tmp_path / "pairs.jsonl", token_rows(200, seed=0, length=150))
    with opened(chromium, allowed_errors=["Failed to load resource"]) as page:
        with running(*config, warm=warm_python) as first:
            page.goto(first.url)
            taught = f"reflogp submit {first.url} pairs.jsonl --reference tiny --watch"
            assert taught in page.locator("main").inner_text()
            with Client(first.url) as client:
                page.goto(f"{first.url}/jobs/{client.submit(file, 'tiny').id}")
            page.evaluate("window.stayed = true")
            page.locator(".badge.running").wait_for()
            first.stop()
        page.locator("#live", has_text="is not responding").wait_for()
        with running(*config, "--port", first.url.rpartition(":")[2], warm=warm_python):
            page.locator(".badge.done").wait_for()
            assert page.evaluate("window.stayed")


@pytest.mark.slow
@pytest.mark.parametrize("script", [True, False])
def test_cancel_and_retry(chromium, service, submit, script):
    job = submit(3000)
    with opened(chromium, java_script_enabled=script) as page:
        page.goto(f"{service}/jobs/{job}")
        page.locator("#cancel").click()
        page.locator("#retry").wait_for()
        assert page.locator(".badge.cancelled").count() == 1
        page.locator("#retry").click()
        page.locator("#cancel").wait_for()
        page.locator("#cancel").click()
        page.locator(".badge.cancelled").wait_for()


# Signing in


def test_signing_in_and_out(chromium, guarded):
    with opened(chromium, allowed_errors=["401"]) as page:
        page.goto(f"{guarded}/?state=done")
        assert page.url == f"{guarded}/signin?next=/%3Fstate%3Ddone"
        page.get_by_label("Token").fill("a-wrong-token")
        page.get_by_role("button", name="Sign in").click()
        assert "token is not valid for this service" in page.get_by_role("alert").inner_text()
        assert page.context.cookies() == [] and "a-wrong-token" not in page.content()
        page.get_by_label("Token").fill(TOKENS["reader"][0])
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(f"{guarded}/?state=done")
        [cookie] = page.context.cookies()
        assert cookie["name"] == f"reflogp_token_{guarded.rpartition(':')[2]}"
        assert [cookie[name] for name in ("path", "sameSite", "httpOnly", "secure")] == ["/", "Strict", True, False]
        assert 11.9 * 3600 < cookie["expires"] - time.time() < 12.1 * 3600
        assert TOKENS["reader"][0] not in page.content() and page.evaluate("document.cookie") == ""
        assert "reader" in page.locator("header").inner_text()
        page.goto(f"{guarded}/signin?next=/references")
        assert page.url == f"{guarded}/references"
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url(f"{guarded}/signin")
        assert page.context.cookies() == []
        page.goto(guarded)
        assert "/signin" in page.url


def test_a_link_from_another_site_reaches_its_page(chromium, guarded):
    """A strict cookie does not come with it; signing in a second time is not asked for."""
    with opened(chromium) as page:
        signed_in_page(page, guarded, "reader")
        link = f'<!doctype html><link rel="icon" href="data:,"><a href="{guarded}/references">the references</a>'
        page.context.route("http://elsewhere.test/", lambda route: route.fulfill(body=link, content_type="text/html"))
        page.goto("http://elsewhere.test/")
        page.get_by_role("link").click()
        page.get_by_role("link", name="Continue").click()
        page.wait_for_url(f"{guarded}/references")


def test_behind_tls_the_cookie_is_secure_and_signing_in_leads_to_no_other_site(guarded):
    headers = {"Origin": guarded, "X-Forwarded-Proto": "https"}
    assert "Secure" in httpx.post(f"{guarded}/signin", data=SIGN_IN, headers=headers).headers["set-cookie"]
    with signed_in(guarded) as client:
        for target in ELSEWHERE:
            answers = client.get("/signin", params={"next": target}), client.post("/signin", data=SIGN_IN | {"next": target})
            assert [(answer.status_code, answer.headers["location"]) for answer in answers] == [(303, "/")] * 2, target


def test_forms_that_are_refused(service, guarded, done):
    """Which requests of other sites' pages are refused, test_sites.py says; here, what forms say in other cases."""
    with signed_in(guarded, "reader") as client:
        answer = client.post("/jobs/some/cancel")
        assert answer.status_code == 403 and "does not have the scope" in answer.text
        answer = httpx.post(f"{guarded}/jobs/some/cancel", cookies=dict(client.cookies))
        assert answer.status_code == 403 and "not sent from a page of this service" in answer.text
    answer = httpx.post(f"{service}/jobs/{done}/cancel", headers={"Origin": service})
    assert answer.status_code == 409 and "<!doctype html>" in answer.text  # it comes too late
    answer = httpx.post(f"{guarded}/jobs/some/cancel", headers={"Origin": guarded})
    assert (answer.status_code, answer.headers["location"]) == (303, "/signin?next=/")
    answer = httpx.post(f"{guarded}/signin", data={"token": "x" * 20_000}, headers={"Origin": guarded})
    assert answer.status_code == 413 and "<!doctype html>" in answer.text


def test_a_program_reads_pages_with_the_bearer_token(guarded):
    bearer = {"Authorization": f"Bearer {TOKENS['anna'][0]}"}
    answer = httpx.get(f"{guarded}/references", headers=bearer)
    assert answer.status_code == 200 and "tiny" in answer.text and "anna" in answer.text
    for wrong in ("Bearer wrong", "Basic Z3Vlc3M6"):
        assert httpx.get(f"{guarded}/references", headers={"Authorization": wrong}).status_code == 303
    with signed_in(guarded) as client:  # behind a proxy with a password or a token of its own
        for own in ("Basic Z3Vlc3M6", "Bearer of-the-proxy"):
            assert client.get("/references", headers={"Authorization": own}).status_code == 200


def test_the_cookie_reads_the_api_and_changes_nothing(guarded):
    with signed_in(guarded) as client:
        assert client.get("/v1/jobs").status_code == 200
        asked = {"reference": "tiny", "dataset": {"upload": "none.jsonl"}}
        for answer in (
            client.post("/v1/jobs", json=asked),
            client.delete("/v1/jobs/some"),
            client.delete("/v1/jobs/some", headers={"Authorization": "Bearer of-the-proxy"}),
            client.post("/v1/jobs/some/retry"),
            client.put("/v1/uploads/a.jsonl", content=b"{}"),
            client.post("/v1/lookup", params={"reference": "tiny"}, json={"keys": []}),
            client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"}),
            httpx.get(f"{guarded}/v1/jobs", cookies=dict.fromkeys(client.cookies, "wrong")),
        ):
            assert answer.status_code == 401, answer.request


def test_headers(service, guarded, done):
    answers = [httpx.get(service + path) for path in paths(done)] + [httpx.get(f"{guarded}/signin")]
    for answer in answers:
        assert answer.headers["content-security-policy"] == POLICY and answer.headers["cache-control"] == "no-store"
        assert not re.search(r"<style|<script(?! src=\"/static)|<[a-z]+[^>]*\s(style|on[a-z]+)=", answer.text), answer.request


# Numbers


def test_formats():
    numbers, seconds = (0, 1234567, 12.34, -0.25, 99.5, 812.25), (0, 0.44, 12.2, 60, 185, 3599.7, 7800, 97200)
    assert [texts.number(value) for value in numbers] == ["0", "1,234,567", "12.3", "−0.25", "99.5", "812"]
    expected = ["0 s", "0.4 s", "12 s", "1 min", "3 min 5 s", "1 h", "2 h 10 min", "1 d 3 h"]
    assert [texts.duration(value) for value in seconds] == expected
    pairs = ((0, 0), (0, 5), (1, 3), (1, 9999), (9999, 10000), (5, 5))
    assert [texts.percent(*pair) for pair in pairs] == ["–", "0%", "33.3%", "<0.1%", "99.9%", "100%"]
    assert [texts.byte_count(value) for value in (0, 1023, 1536, 5 << 30)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 GiB"]
    signed = DatasetSpec(uri="https://user:secret@host/a/b.jsonl?signature=secret")
    assert dataset_name(signed) == "https://host/a/b.jsonl"
