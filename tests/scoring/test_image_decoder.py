"""The processes that decode untrusted images: whatever an image does to them, its row is named and the others go on."""

import gc
import hashlib
import os
import signal
import threading
import time

import psutil
import pytest

from reflogp.scoring.data import image_decoder
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
        assert found[content] == (pixel_digest(image), kind_of_image(image))


def test_a_large_image_passes_through_the_socket():
    large = picture(3, (4000, 3000))
    with ImageDecoder() as decoder:
        assert decoder.identify(encoded(large, "BMP")) == (pixel_digest(large), ((4000, 3000), "RGB"))
