"""The processes that decode untrusted images: whatever an image does to them, its row is named and the others go on."""

import gc
import hashlib
import os
import signal
import threading
import time

import psutil
import pytest

from reflogp.scoring.data import image_decoder, images
from reflogp.scoring.data.image_decoder import ImageDecoder
from reflogp.scoring.data.images import ImageReader, below
from reflogp.scoring.data.pixel_cache import PixelCache
from reflogp.scoring.data.shape import RowError
from reflogp.store.images import kind_of_image, pixel_digest
from tests.vision_models import encoded, picture

GOOD = encoded(picture(1), "PNG")


@pytest.fixture(autouse=True)
def no_child_is_left():
    before = {child.pid for child in psutil.Process().children()}
    yield
    gc.collect()
    end = time.monotonic() + 10
    while left := {child.pid for child in psutil.Process().children()} - before:
        assert time.monotonic() < end, left
        time.sleep(0.01)


@pytest.fixture
def hostile(monkeypatch, tmp_path):
    """Images whose decoding does what their content says, in the child, beside images that decode."""
    monkeypatch.setenv("REFLOGP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(image_decoder, "SECONDS", 0.5)
    monkeypatch.setattr(image_decoder, "_MEMORY", 256 << 20)
    decode, tries = image_decoder.decoded, tmp_path / "tries"

    def decoded(data):
        match data:
            case b"endless":
                hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # C code that no Python handler can interrupt
            case b"endless Python":
                while True:
                    pass
            case b"memory":
                bytearray(4 << 30)
            case b"crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case b"exit":
                os._exit(7)
            case b"killed once":  # as by the kernel, when the machine's memory is short
                with tries.open("a+") as file:
                    file.write("x")
                    if file.tell() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                return decode(GOOD)
        return decode(data)

    monkeypatch.setattr(image_decoder, "decoded", decoded)


REASONS = {
    b"endless": "more than 0.5 s",
    b"endless Python": "more than 0.5 s",
    b"memory": "too much memory",
    b"crash": "SIGSEGV",
    b"exit": "status 7",
}


def test_an_image_that_ends_its_process_is_named_and_the_others_go_on(hostile):
    bad = list(REASONS)
    rows = [{"images": [GOOD, content] if content in bad else [content]} for content in [GOOD, *bad, b"killed once"] * 3]
    with PixelCache() as cache, ImageDecoder() as decoder:
        found = ImageReader(below(None), cache, decoder).read(rows)
    for row, of_row in zip(rows, found, strict=True):
        if (content := row["images"][-1]) in bad:
            assert isinstance(of_row, RowError) and REASONS[content] in str(of_row) and "image 1" in str(of_row)
        else:
            assert [(image.digest, image.kind) for image in of_row] == [(pixel_digest(picture(1)), kind_of_image(picture(1)))]


def test_stopping_does_not_wait_for_an_image(hostile, monkeypatch):
    monkeypatch.setattr(image_decoder, "SECONDS", 1000.0)
    began = time.monotonic()

    def check():
        if time.monotonic() > began + 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), PixelCache() as cache, ImageDecoder() as decoder:
        ImageReader(below(None), cache, decoder).read([{"images": [b"endless"]}] * 8, check)
    assert time.monotonic() - began < 30


def test_many_threads_share_the_children(hostile):
    contents = [encoded(picture(seed), form) for seed in range(20) for form in ("PNG", "JPEG", "GIF", "BMP")]
    with ImageDecoder() as decoder:
        found = {}

        def work(part):
            found.update({content: decoder.identify(content) for content in contents[part::8]})

        threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(decoder._started) <= decoder.children
    for content in contents:
        image = image_decoder.decoded(content)
        assert found[content][:2] == (pixel_digest(image), kind_of_image(image))


def test_a_large_image_passes_through_the_socket():
    large = picture(3, (4000, 3000))
    with ImageDecoder() as decoder:
        assert decoder.identify(encoded(large, "BMP"))[:2] == (pixel_digest(large), ((4000, 3000), "RGB"))


def test_threads_that_wait_for_a_child_end_when_reading_is_stopped(tmp_path):
    """Between two images of a row, a thread has no child."""
    before = threading.active_count()
    (tmp_path / "a.png").write_bytes(GOOD)
    open_file, stopping = below(tmp_path), threading.Event()

    def slow(path):
        stopping.wait(1.0)
        return open_file(path)

    def check():
        if threading.active_count() > before:
            stopping.set()
            raise KeyboardInterrupt

    for _ in range(20):
        stopping.clear()
        with pytest.raises(KeyboardInterrupt), ImageDecoder() as decoder:
            ImageReader(slow, PixelCache(), decoder).read([{"images": ["a.png"] * 5}] * 8, check)
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.01)


def test_an_answer_that_is_not_taken_is_not_given_to_the_next_image(monkeypatch):
    receive, fails = image_decoder._Child._receive, [True]

    def failing(self, size):
        if fails.pop() if fails else False:
            raise MemoryError
        return receive(self, size)

    monkeypatch.setattr(image_decoder._Child, "_receive", failing)
    with ImageDecoder() as decoder:
        decoder.children = 1
        with pytest.raises(MemoryError):
            decoder.identify(encoded(picture(1), "PNG"))
        for seed in range(4):
            assert decoder.identify(encoded(picture(seed), "PNG"))[0] == pixel_digest(picture(seed))


def test_all_images_of_a_row_share_limits(monkeypatch, tmp_path):
    monkeypatch.setenv("REFLOGP_CACHE_DIR", str(tmp_path))
    rows = [{"images": [encoded(picture(seed, (40, 50)), "BMP") for seed in range(count)]} for count in (1, 3, 4)]

    def problems(name, value):
        with monkeypatch.context() as patch, PixelCache() as cache, ImageDecoder() as decoder:
            patch.setattr(images, name, value)
            return [str(of) if isinstance(of, RowError) else None for of in ImageReader(below(None), cache, decoder).read(rows)]

    assert problems("MAX_ROW_PIXELS", 3 * 40 * 50)[:2] == [None, None]
    assert "more than 6,000 pixels in total" in problems("MAX_ROW_PIXELS", 3 * 40 * 50)[2]
    assert "MiB in total" in problems("MAX_ROW_BYTES", 3 * len(rows[0]["images"][0]))[2]
    monkeypatch.setattr(images, "_SLOW_SECONDS", 0.0)  # nothing is remembered
    monkeypatch.setenv("REFLOGP_CACHE_DIR", str(tmp_path / "other"))
    for _ in range(2):
        assert all("processor time in total" in problem for problem in problems("ROW_SECONDS", -1.0))
