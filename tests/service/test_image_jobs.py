"""Jobs with images: uploads that hold them, files below a root, values as the command line's, images that cannot be used."""

import base64
import io
import os
import re

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.client import Client, ServicePath
from reflogp.scoring import score
from tests.conftest import write_rows
from tests.scoring.stored_rows import rows_of, same_rows
from tests.service.serving import float32, running, settings_file, wait_until
from tests.vision_models import encoded, make, pair, picture

GOOD = encoded(picture(1), "PNG")


@pytest.fixture(scope="module")
def service(place, warm_python):
    """A service of a model, and a root `data` with images, links and a secret image beside it."""
    data = place / "data"
    (data / "deep").mkdir(parents=True)
    for seed in range(3):
        (data / "deep" / f"{seed}.png").write_bytes(encoded(picture(seed, (40 + seed, 60)), "PNG"))
    (place / "secret.png").write_bytes(GOOD)
    (data / ".hidden.png").write_bytes(GOOD)
    (data / "out.png").symlink_to(place / "secret.png")
    (data / "inside.png").symlink_to("deep/0.png")
    os.mkfifo(data / "pipe.png")
    make("LLaVA", place / "llava")
    models = {"ref": float32(place / "llava")}
    file = settings_file(place, place / "store", models, dataset_roots=[str(place / "data")], pinned="ref")
    with running("--config", file, warm=warm_python) as service:
        yield service


def uri(image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image, "PNG")).decode()


def result_of(service, job) -> pa.Table:
    return pq.read_table(io.BytesIO(httpx.get(f"{service.url}/v1/jobs/{job}/result").content))


def done(service, dataset):
    """Submit a job and wait for its end; gives its state and result."""
    with Client(service.url) as client:
        job = client.watch(client.submit(dataset, "ref").id)
    assert job.state == "done", (job, "".join(service.log))
    return job, result_of(service, job.id)


def test_uploads_that_hold_their_images_are_scored_as_on_the_command_line(service, place, tmp_path):
    alike = {"chosen": "a red square " * 9, "rejected": "a red square " * 9 + "two"}  # so that the report shows the rows
    texts = [pair(f"which? {n}", [uri(picture(n)), uri(picture(n + 1))][: n % 3], **alike) for n in range(12)]
    lines = write_rows(tmp_path / "rows.jsonl", texts)
    images = [encoded(picture(n + 20), "JPEG") for n in range(6)]
    table = [{**pair(f"what? {n}", None, **alike), "images": [{"bytes": data, "path": "x"}]} for n, data in enumerate(images)]
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(table), parquet)
    for file, count in ((lines, 24), (parquet, 12)):
        job, result = done(service, file)
        assert job.summary["bad_rows"] == 0 and job.summary["sequences"] == count
        assert result["error"].null_count == len(result) == count // 2
        summary = score(str(place / "llava"), str(file), tmp_path / "here", dtype="float32")
        report = httpx.get(f"{service.url}/v1/jobs/{job.id}/report").text
        assert re.search(r'<img src="data:image/png;base64,[^"]+" alt="image 1 of row \d+">', report)
        assert re.search(r"⟨image, (16|32) tokens⟩", report)
        assert done(service, file)[0].id == job.id
    here, there = (rows_of(store, summary.reference_id) for store in (tmp_path / "here", place / "store"))
    same_rows(here, {key: row for key, row in there.items() if key in here})


def test_images_below_a_root_are_read_and_no_others(service, place):
    data = place / "data"
    good = ["0.png", "../inside.png", "../deep/1.png", str(data / "deep" / "2.png")]
    bad = {
        "../out.png": "not under a folder",
        "/etc/passwd": "not under a folder",
        "../.hidden.png": "hidden file or folder",
        "none.png": "no such file",
        "../pipe.png": "the path is not a file",
        "a/../" * 2000 + "0.png": "the path is too long",
        "http://127.0.0.1:1/a.png": "a URL",
    }
    rows = [pair("what is it?", [name]) for name in [*good, *bad]]
    write_rows(data / "deep" / "rows.jsonl", rows)
    job, result = done(service, ServicePath(str(data / "deep" / "rows.jsonl")))
    errors = result["error"].to_pylist()
    assert errors[: len(good)] == [None] * len(good)
    for (name, why), error in zip(bad.items(), errors[len(good) :], strict=True):
        assert why in error, name
    assert job.summary["bad_rows"] == len(bad) == sum(entry["rows"] for entry in job.summary["bad_row_reasons"])
    assert len(set(result["chosen_key"].to_pylist()[:2])) == 1  # the same pixels, by another path
    (data / "deep" / "none.png").write_bytes(GOOD)
    job, _ = done(service, ServicePath(str(data / "deep" / "rows.jsonl")))
    assert job.summary["bad_rows"] == len(bad) - 1, "the same submission is a new job: its images may have changed"
    (data / "deep" / "none.png").unlink()


def test_an_upload_that_names_files_reads_none(service, place, tmp_path):
    rows = [pair("?", [str(place / "data" / "deep" / "0.png")]), pair("?", ["0.png"]), pair("?", [uri(picture(1))])]
    job, result = done(service, write_rows(tmp_path / "rows.jsonl", rows))
    assert job.summary["bad_rows"] == 2 and result["error"].to_pylist()[2] is None
    assert all("must contain its images" in error for error in result["error"].to_pylist()[:2])


def test_images_replaced_after_a_job_are_other_values_in_the_next_one(service, place):
    data = place / "data"
    (data / "changing.png").write_bytes(encoded(picture(50), "PNG"))
    file = write_rows(data / "changing.jsonl", [pair("what?", ["changing.png"])])
    _, first = done(service, ServicePath(str(file)))
    (data / "changing.png").write_bytes(encoded(picture(51), "PNG"))
    job, second = done(service, ServicePath(str(file)))
    assert job.summary["scored"] == 2 and first["chosen_key"] != second["chosen_key"] and second["error"] == first["error"]
    assert first["ref_chosen_logps"] != second["ref_chosen_logps"]
    (data / "changing.png").write_bytes(encoded(picture(50), "BMP"))
    job, third = done(service, ServicePath(str(file)))
    assert job.summary["hits"] == 2 and third["ref_chosen_logps"] == first["ref_chosen_logps"]


def test_an_image_that_changes_during_a_job_leaves_the_worker_alive(service, place):
    data = place / "data" / "busy"
    data.mkdir()
    for number in range(40):
        (data / f"{number}.png").write_bytes(encoded(picture(200 + number), "PNG"))
    rows = [pair(f"which is it? {number}", [f"{number % 40}.png"]) for number in range(400)]
    file = write_rows(data / "rows.jsonl", rows)
    workers = [worker.pid for worker in service.workers()]
    with Client(service.url) as client:
        job = client.submit(ServicePath(str(file)), "ref").id
        wait_until(lambda: client.job(job).progress.rows > 0 or client.job(job).state == "done")
        for number in range(20):
            (data / f"{number}.png").write_bytes(encoded(picture(300 + number), "PNG"))
        assert client.watch(job).state == "done"
    errors = set(result_of(service, job)["error"].to_pylist())
    assert [worker.pid for worker in service.workers()] == workers
    assert all(error is None or "was changed" in error or "is missing from the store" in error for error in errors)


def test_hostile_images_are_bad_rows_and_the_worker_lives_on(service, tmp_path):
    workers = [worker.pid for worker in service.workers()]
    bomb = encoded(picture(1).convert("1").resize((13_400, 13_400)), "PNG")
    images = ["data:image/png;base64," + base64.b64encode(data).decode() for data in (bomb, GOOD[:50], GOOD)]
    _, result = done(service, write_rows(tmp_path / "rows.jsonl", [pair("?", [image]) for image in images]))
    errors = result["error"].to_pylist()
    assert "exceeds limit" in errors[0] and "decoded" in errors[1] and errors[2] is None
    assert [worker.pid for worker in service.workers()] == workers


def test_kto_rows_with_images_and_a_model_of_text_refuse_them(service, serve, tmp_path):
    text = {"prompt": "a", "completion": "b", "label": True}
    kto = [text | {"images": [uri(picture(1))]}, text]
    _, result = done(service, write_rows(tmp_path / "kto.jsonl", kto))
    assert "more than text" in result["error"].to_pylist()[0]
    with serve() as of_text:
        rows = [pair("?", [uri(picture(1))]), pair("?", [])]
        _, result = done(of_text, write_rows(tmp_path / "rows.jsonl", rows))
        assert "more than text" in result["error"].to_pylist()[0] and result["error"].to_pylist()[1] is None
