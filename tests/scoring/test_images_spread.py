"""Pairs with images on several workers: the same values as on one, and what is sent to a worker."""

import random
import shutil
import signal
from contextlib import suppress
from functools import partial

import numpy as np
import psutil
import pytest
from PIL import Image

from reflogp.scoring.data import tokenized as tokenized_module
from reflogp.scoring.data.images import ImageFile, RowImage, below, content_digest
from reflogp.scoring.data.objects import open_dataset
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import RowError
from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset
from reflogp.scoring.data.tokenized import TokenizedDataset
from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.machine import Place
from reflogp.scoring.runs import scheduler, unit_queue
from reflogp.scoring.runs.misses import Miss
from reflogp.scoring.runs.pipeline import OwnEngine
from reflogp.scoring.runs.processes import LocalWorkers
from reflogp.scoring.runs.scheduler import Scheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.runs.unit_queue import UnitQueue
from reflogp.scoring.runs.units import VisionCache, decode, encode
from reflogp.scoring.torch_engine.sequences import Sequence, SequenceImages
from reflogp.scoring.vision import load_processor
from reflogp.store import Store, UsageError, describe_reference
from reflogp.store.images import kind_of_image, pixel_digest
from tests.conftest import write_rows
from tests.scoring.stored_rows import rows_of, same_rows
from tests.scoring.test_spread import workers_of
from tests.scoring.watching import Watching
from tests.vision_models import encoded, make, pair, pairs_with_files, picture


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "llava"
    make("LLaVA", folder)
    return str(folder)


@pytest.fixture
def score(llava, tmp_path):
    """score(dataset, store, places=None, watcher=None) -> summary."""

    def run(source, store, places=None, watcher=None):
        reference = describe_reference(llava, "float32")
        choice = EngineChoice("torch", "cpu", 512)
        dataset = TokenizedDataset(source, lambda: load_tokenizer(llava), load_vision=lambda: load_processor(llava, llava))
        if places is None:
            scorer = Scheduler(lambda: choice.make(llava, reference))
        else:
            scorer = Scheduler(workers=LocalWorkers(llava, reference, choice, places))
        try:
            return score_dataset(dataset, Store(tmp_path / store), reference, scorer, watcher=watcher)
        finally:
            scorer.close()

    return run


@pytest.mark.slow
def test_two_workers_store_what_one_engine_stores_although_workers_are_killed(score, llava, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", pairs_with_files(tmp_path))
    here = score(RowSource(str(file)), "here")
    killed = []

    def kill():
        with suppress(psutil.Error):  # one that was killed just now
            worker = random.choice(workers_of())
            worker.send_signal(signal.SIGKILL)
            killed.append(worker.pid)
        return len(killed) == 3

    with pytest.warns(UserWarning, match="was lost"):
        there = score(RowSource(str(file)), "there", [Place("cpu", "cpu")] * 2, Watching(1, kill))
    assert (here.scored, here.bad_rows) == (there.scored, there.bad_rows) and here.scored > 100 and killed
    same_rows(rows_of(tmp_path / "here", here.reference_id), rows_of(tmp_path / "there", here.reference_id))


def test_decoded_pictures_go_to_workers(score, tmp_path):
    data = [pair("what?", [picture(seed)]) for seed in range(4)]
    here, there = score(open_dataset(data), "here"), score(open_dataset(data), "there", [Place("cpu", "cpu")])
    assert here.scored == there.scored == 8
    same_rows(rows_of(tmp_path / "here", here.reference_id), rows_of(tmp_path / "there", here.reference_id))


def image(source) -> RowImage:
    return RowImage(pixel_digest(source), kind_of_image(source), source)


def miss(number: int, pictures: list[RowImage], vision) -> Miss:
    images = SequenceImages(tuple(pictures), (4,) * len(pictures), vision, True) if pictures else None
    return Miss(bytes([number]) * 16, Sequence(np.array([1, number]), np.array([2]), images=images), 1, [number])


def modes() -> list[Image.Image]:
    """Pictures of every mode that a file may give."""
    rgb = picture(1)
    clear = rgb.convert("P")
    clear.info["transparency"] = 3
    deep = Image.fromarray(np.arange(48 * 40, dtype=np.uint16).reshape(40, 48) * 30)
    converted = [rgb.convert(mode) for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I", "F")]
    return [rgb, clear, deep, *converted]


def test_a_unit_carries_its_images_once_and_their_pixels(llava):
    vision = load_processor(llava, llava)
    pictures = [image(mode) for mode in modes()]
    misses = [miss(number, [pictures[number], pictures[0]], vision) for number in range(len(pictures))]
    content, problems = encode([miss(100, [], vision), *misses, *misses])
    assert not problems
    assert len(content) < sum(picture.size for picture in pictures) * 3
    cache = VisionCache(llava, False)
    plain, *sent = [got.sequence for got in decode(content, cache.find)]
    assert plain.images is None and len(sent) == 2 * len(misses)
    for of_row, got in zip([*misses, *misses], sent, strict=True):
        images = of_row.sequence.images
        assert got.images.digests == images.digests and got.images.counts == images.counts
        for one, other in zip(images.pictures, got.images.pictures, strict=True):
            assert pixel_digest(other.load()) == pixel_digest(one.load())
    assert decode(encode([miss(1, [], vision)])[0], None)[0].sequence.images is None


def test_a_worker_without_the_runs_processor_refuses_and_another_folder_is_found(llava, tmp_path):
    vision = load_processor(llava, llava)
    other = load_processor(llava, llava).processor
    other.image_processor.image_mean = [0.1, 0.2, 0.3]
    other.save_pretrained(tmp_path / "other")
    found = load_processor(str(tmp_path / "other"), llava)
    assert found.tokens.settings != vision.tokens.settings
    picture_ = image(picture(1))
    content, _ = encode([miss(1, [picture_], found)])
    assert decode(content, VisionCache(llava, False).find)[0].sequence.images.vision.tokens.settings == found.tokens.settings
    (tmp_path / "other").rename(tmp_path / "away")
    with pytest.raises(UsageError, match="image processor is not on this worker's machine"):
        decode(content, VisionCache(llava, False).find)


def test_an_image_that_is_gone_or_was_changed_is_one_sentence(llava, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(encoded(picture(1), "PNG"))
    source = ImageFile("a.png", content_digest(file.read_bytes()), file.stat().st_size, below(tmp_path))
    made = RowImage(pixel_digest(picture(1)), kind_of_image(picture(1)), source)
    assert made.encoded() == file.read_bytes()
    file.write_bytes(encoded(picture(2), "PNG"))
    vision = load_processor(llava, llava)
    bad, good = miss(1, [image(picture(3)), made], vision), miss(2, [image(picture(3))], vision)
    content, problems = encode([bad, good, bad])
    assert problems == {bad: "a.png was changed after it was read; run again"}
    assert [got.key for got in decode(content, VisionCache(llava, False).find)] == [good.key]
    assert list(encode([bad])[1]) == [bad]
    file.unlink()
    with pytest.raises(RowError, match="cannot be read"):
        made.load()


def test_a_unit_has_a_bounded_size_of_images(monkeypatch):
    monkeypatch.setattr(unit_queue, "_IMAGE_BYTES", 100)
    queue = UnitQueue()
    pictures = [RowImage(bytes([size]) * 16, ((1, 1), "L"), bytes(size)) for size in (40, 50, 60, 200)]
    chosen = [[0], [0, 1], [2], [0], [3], [3], []]
    queue.put([miss(number, [pictures[at] for at in places], None) for number, places in enumerate(chosen)])
    taken = []
    while (unit := queue.take(100)) is not None:
        taken.append([of_unit.rows[0] for of_unit in unit.misses])
        assert len(queue) == len(chosen) - sum(map(len, taken))
    assert taken == [[0, 1], [2, 3], [4, 5, 6]]


def test_misses_do_not_wait_in_memory_with_their_images(llava, tmp_path, monkeypatch):
    """A run collects thousands of misses before it scores them, unless their images take much memory."""
    monkeypatch.setattr(scheduler, "_IMAGE_BYTES", 30_000)
    given = []

    class Noting(Scheduler):
        """Its engine gets misses only when they are too many, and at the end."""

        is_last = False

        def finish(self):
            self.is_last = True
            super().finish()

    class Late(OwnEngine):
        def is_starved(self):
            return super().is_starved() and (run.scheduler.is_last or run.scheduler._is_full())

        def give(self, misses):
            given.append(sum(picture.held for of in misses for picture in of.sequence.images.pictures))
            super().give(misses)

    monkeypatch.setattr(scheduler, "OwnEngine", Late)

    def run(data, store):
        given.clear()
        reference = describe_reference(llava, "float32")
        dataset = TokenizedDataset(data, lambda: load_tokenizer(llava), load_vision=lambda: load_processor(llava, llava))
        run.scheduler = Noting(lambda: EngineChoice("torch", "cpu", 512).make(llava, reference))
        try:
            assert score_dataset(dataset, Store(tmp_path / store), reference, run.scheduler).bad_rows == 0
        finally:
            run.scheduler.close()

    monkeypatch.setattr(tokenized_module, "tokenize_dataset", partial(tokenize_dataset, window=2))
    images = [encoded(picture(seed), "BMP") for seed in range(20)]
    run(open_dataset([pair("what?", [data]) for data in images]), "bytes")
    assert len(given) > 3 and max(given) < 30_000 + 4 * 2 * len(images[0])
    for seed, data in enumerate(images):
        (tmp_path / f"{seed}.bmp").write_bytes(data)
    run(RowSource(str(write_rows(tmp_path / "rows.jsonl", [pair("what?", [f"{seed}.bmp"]) for seed in range(20)]))), "files")
    assert given == [0]


def test_an_image_that_changes_before_it_is_sent_is_a_bad_row_and_the_others_go_on(score, tmp_path):
    data = pairs_with_files(tmp_path)[:20]
    file = write_rows(tmp_path / "rows.jsonl", data)
    source = RowSource(str(file))
    gone = data[7]["images"][0] if data[7]["images"] else data[8]["images"][0]
    read, seen = source.open_image, []

    def removing(path):
        opened = read(path)
        seen.append(path)
        if path == gone and seen.count(gone) == sum(row["images"].count(gone) for row in data):
            (tmp_path / gone).unlink()
        return opened

    source.open_image = removing
    watching = Watching()
    summary = score(source, "there", [Place("cpu", "cpu")], watching)
    expected = {number for number, row in enumerate(data) if gone in row["images"]}
    assert set(watching.bad) == expected and summary.bad_rows == len(expected) and summary.scored > 10
    assert all("cannot be read" in problem for problem in watching.bad.values())


def test_the_runs_own_folder_is_enough_for_a_worker(llava, tmp_path):
    """The processor of the model's folder is broken; the run was given another one."""
    load_processor(llava, llava).processor.save_pretrained(tmp_path / "processor")
    made = image(picture(1))
    content, _ = encode([miss(1, [made], load_processor(str(tmp_path / "processor"), llava))])
    shutil.copytree(llava, tmp_path / "model")
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (tmp_path / "model" / name).is_file():
            (tmp_path / "model" / name).write_text("{")
    [got] = decode(content, VisionCache(str(tmp_path / "model"), False).find)
    assert got.sequence.images.digests == (made.digest,)
