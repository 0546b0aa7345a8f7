"""`reflogp submit` and `reflogp jobs` as a person meets them, against a service as it runs."""

import re
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
import torch

from reflogp.client import Client
from tests.conftest import INTERRUPTIBLE, last_object, write_rows
from tests.service.serving import float32, running, serving, settings_file, token_rows, wait_until

DONE, FAILED, USAGE, MISSES, INTERRUPTED = 0, 1, 2, 3, 130
HASH = "3f0c9d2b81a4e567"
EXPORT = ("--as", "open-instruct", "--hash", HASH, "--loss-type", "dpo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the service may read on its own machine."""
    return tmp_path_factory.mktemp("submit")


@pytest.fixture(scope="module")
def url(reference_folder, folder, warm_python):
    (folder / "data").mkdir()
    settings = settings_file(folder, folder / "store", {"sft": float32(reference_folder)}, dataset_roots=[f"{folder}/data"])
    with serving("--config", settings, warm=warm_python) as found:
        yield found


@pytest.mark.slow
def test_submit_watches_a_job_and_saves_its_values(reflogp, url, pairs_file, tmp_path):
    output = tmp_path / "values.parquet"
    submit = ("submit", url, pairs_file, "--reference", "sft", "--max-length", 400, "--output", output)
    code, out, err = reflogp(*submit)
    assert code == DONE
    assert "40 rows, 80 sequences: 0 hits, 57 scored, 23 duplicates" in out and "tokens/s" in out
    assert f"{url}/jobs/" in err and "done" in err
    assert reflogp("export", output, *EXPORT, "-o", tmp_path)[0] == DONE
    exported = torch.load(tmp_path / f"{HASH}.pt", weights_only=True)
    assert exported["chosen_logps"].tolist() == pq.read_table(output)["ref_chosen_logps"].to_pylist()
    code, out, _ = reflogp(*submit, "--json")
    job = last_object(out)
    assert (code, job["state"], job["attempts"], job["settings"]["max_length"]) == (DONE, "done", 1, 400)
    code, out, _ = reflogp("jobs", "show", url, job["id"])
    assert code == DONE
    for told in (job["id"], "done", "sft", job["reference_id"], "max_length 400", "80 of 80 sequences"):
        assert told in out
    assert out.count("tokens/s") == 1 and f"{job['summary']['tokens_per_second']:,.0f} tokens/s" in out


def test_without_watch_it_says_how_to_watch_and_the_report_is_saved(reflogp, url, tmp_path, pair_rows):
    code, out, err = reflogp("submit", url, write_rows(tmp_path / "few.jsonl", pair_rows[40:44]), "--reference", "sft")
    job = out.split()[1]
    assert code == DONE
    command = next(line for line in err.splitlines() if line.startswith("watch it: ")).removeprefix("watch it: reflogp ")
    assert command.split() == ["jobs", "show", url, job, "--watch"]
    code, out, _ = reflogp(*command.split(), "--json")
    assert (code, last_object(out)["id"], last_object(out)["state"]) == (DONE, job, "done")
    code, _, err = reflogp("jobs", "report", url, job, "-o", tmp_path / "report.html")
    assert code == DONE and f"report saved to {tmp_path}/report.html" in err
    page = (tmp_path / "report.html").read_text()
    assert "few.jsonl" in page and "sft" in page, "the names that the job has"
    code, _, err = reflogp("jobs", "report", url, job, "-o", tmp_path / "report.html" / "again.html")
    assert code == USAGE and "again.html cannot be written" in err


def test_bad_rows_are_told_by_the_exit_code(reflogp, url, folder, tmp_path, pair_rows):
    data = write_rows(tmp_path / "some_bad.jsonl", [*pair_rows[44:46], {"prompt": "p", "chosen": None, "rejected": 3}])
    submit = ("submit", url, data, "--reference", "sft", "--watch")
    code, out, _ = reflogp(*submit)
    assert code == MISSES
    counts, reason, _, where = out.splitlines()
    assert re.fullmatch(r"3 rows, 4 sequences: \d hits?, \d scored; 1 bad row", counts)
    assert reason.startswith("  row 2: chosen is null or missing")
    assert where.startswith("reference ") and f" of {folder}" in where
    assert reflogp(*submit[:-1])[0] == MISSES  # known, and done
    job, values = last_object(reflogp(*submit, "--json")[1])["id"], tmp_path / "v.parquet"
    code, _, err = reflogp("jobs", "result", url, job, "-o", values)
    assert code == DONE and "values saved" in err
    assert [error is None for error in pq.read_table(values)["error"].to_pylist()] == [True, True, False]
    code, _, err = reflogp("export", values, *EXPORT, "-o", tmp_path)
    assert code == MISSES and "1 of 3 rows have no values" in err and "row 2." in err


def test_a_job_that_cannot_be_done_fails(reflogp, url, tmp_path):
    data, output = tmp_path / "broken.parquet", tmp_path / "values.parquet"
    data.write_bytes(b"PAR1 and nothing more")
    code, out, _ = reflogp("submit", url, data, "--reference", "sft", "--output", output)
    assert code == FAILED and "failed" in out and not output.exists()


def test_notes_about_the_rows_are_told_by_submit_and_show(reflogp, url, tmp_path):
    rows = [{"question": f"q {n}", "prompt": "", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(3)]
    code, out, _ = reflogp("submit", url, write_rows(tmp_path / "bare.jsonl", rows), "--reference", "sft", "--watch")
    assert code == DONE
    for said in ("note: 3 rows have no prompt tokens", "the file has question; rename the column"):
        assert said in out
    job = last_object(reflogp("jobs", "ls", url, "--limit", 1, "--json")[1])["jobs"][0]["id"]
    assert "note: 3 rows have no prompt tokens" in reflogp("jobs", "show", url, job)[1]


def test_a_path_on_the_services_machine(reflogp, url, folder, tmp_path, pair_rows):
    data = write_rows(folder / "data" / "there.jsonl", pair_rows[46:48])
    code, out, _ = reflogp("submit", url, data, "--reference", "sft", "--on-service", "--watch", "--json")
    assert (code, last_object(out)["dataset"]["path"]) == (DONE, str(data))
    outside = write_rows(tmp_path / "secret.jsonl", pair_rows[46:48])
    assert reflogp("submit", url, outside, "--reference", "sft", "--on-service")[0] in (FAILED, USAGE)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{url}", "nothing.jsonl", "--reference", "sft"], "no such file"),
        (["{url}", "{folder}", "--reference", "sft"], "--on-service"),
        (["{url}", "{pairs}"], "--reference"),
        (["{url}", "{pairs}", "--reference", "nobody"], "reflogp doctor --url {url}"),
        (["{url}", "{pairs}", "--reference", "sft", "--output", "x.csv"], ".parquet"),
        (["{url}", "{pairs}", "--reference", "sft", "--output", "/nowhere/x.parquet"], "is not a folder"),
        (["{url}", "file:///etc/passwd", "--reference", "sft"], "file"),
        (["ftp://x", "{pairs}", "--reference", "sft"], "http://"),
    ],
)
def test_bad_usage_is_one_sentence(reflogp, url, folder, pairs_file, arguments, says):
    code, out, err = reflogp("submit", *(a.format(url=url, folder=folder, pairs=pairs_file) for a in arguments))
    assert (code, out) == (USAGE, "")
    assert says.format(url=url) in " ".join(err.split())


def test_jobs_are_listed(reflogp, url, tmp_path, pair_rows):
    data = write_rows(tmp_path / "listed.jsonl", pair_rows[48:50])
    title = "[red]not red[/red]\x1b[2J"
    made = last_object(reflogp("submit", url, data, "--reference", "sft", "--title", title, "--watch", "--json")[1])
    code, out, _ = reflogp("jobs", "ls", url, "--limit", 1)
    assert code == DONE and "[red]" in out and "\x1b" not in out
    listed = last_object(reflogp("jobs", "ls", url, "--state", "done", "--json")[1])
    assert made["id"] in [job["id"] for job in listed["jobs"]]
    assert listed["counts"]["done"] >= 1
    heading, listed_job, _ = out.splitlines()
    assert heading.split()[:2] == ["job", "state"]
    assert listed_job.split()[:5] == [made["id"], "done", "4", "of", "4"] and "-listed.jsonl" in listed_job
    assert reflogp("jobs", "ls", url, "--state", "asleep")[0] == USAGE
    assert reflogp("jobs", "show", url, "0123456789abcdef")[0] == USAGE


@pytest.mark.slow
def test_an_interrupted_watch_leaves_the_job_running(reflogp, url, tmp_path):
    data = write_rows(tmp_path / "long.jsonl", token_rows(4000, time.time_ns(), 250))
    submit = ("submit", url, str(data), "--reference", "sft", "--watch")
    with subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE, *submit], stderr=subprocess.PIPE, text=True) as process:
        try:
            job = process.stderr.readline().split()[1].rstrip(";")
            with Client(url) as client:
                wait_until(lambda: client.job(job).progress.scored > 0, 60)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()  # otherwise a failure would wait for the end of the job
    assert process.returncode == INTERRUPTED and "Traceback" not in err
    assert f"job {job} continues on the service" in err
    assert f"reflogp jobs show {url} {job} --watch" in err
    assert last_object(reflogp("jobs", "show", url, job, "--json")[1])["state"] == "running"
    assert reflogp("jobs", "retry", url, job)[0] == FAILED
    assert reflogp("jobs", "result", url, job, "-o", tmp_path / "v.parquet")[0] == FAILED
    cancel = err.strip().rpartition("cancel it: reflogp ")[2]
    assert reflogp(*cancel.split())[0] == DONE
    code, out, _ = reflogp("jobs", "show", url, job, "--watch")
    assert code == FAILED and "was cancelled" in out
    code, _, err = reflogp("jobs", "result", url, job, "-o", tmp_path / "v.parquet")
    advice = re.search(r"`reflogp (jobs retry [^`]*)`", err)[1]  # as the service says it for a caller of the route
    code, out, _ = reflogp(*advice.split(), "--json")
    assert (code, last_object(out)["state"] in ("queued", "running")) == (DONE, True)
    assert reflogp("jobs", "cancel", url, job)[0] == DONE


@pytest.mark.slow
def test_a_watch_says_when_the_service_is_away_and_when_it_is_back(reference_folder, tmp_path, warm_python):
    config = ("--config", settings_file(tmp_path, tmp_path / "store", {"sft": float32(reference_folder)}))
    data = write_rows(tmp_path / "long.jsonl", token_rows(2000, 1, 250))
    with running(*config, warm=warm_python) as first:
        watch = ("submit", first.url, str(data), "--reference", "sft", "--watch")
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE, *watch], stderr=subprocess.PIPE, text=True)
        job = process.stderr.readline().split()[1].rstrip(";")
        assert any(line.endswith(": running\n") for line in process.stderr)
        first.stop()
    assert f"{first.url} is away (ConnectError); asking again\n" in process.stderr
    with running(*config, "--port", first.url.rpartition(":")[2], warm=warm_python), Client(first.url) as client:
        assert f"{first.url} answers again\n" in process.stderr
        client.cancel(job)
        assert process.wait(60) == FAILED
    process.stderr.close()
