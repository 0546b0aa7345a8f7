"""Pairs with images: values against a plain forward, keys by pixels, every form of an image, and images that cannot be used."""

import base64
import contextlib
import io
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, IterableDataset, List
from datasets import Image as ImageFeature
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from reflogp.scoring import TorchEngine, join, report, score
from reflogp.scoring.data import tokenize as tokenize_module
from reflogp.scoring.data.objects import open_dataset
from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import TokenizedDataset, load_tokenizer, tokenize_dataset
from reflogp.scoring.errors import DatasetError, EngineError, InvalidSequencesError, TokenizerError
from reflogp.scoring.runs.score import images_for_engine
from reflogp.scoring.torch_engine import attention, selfcheck
from reflogp.scoring.torch_engine import engine as engine_module
from reflogp.scoring.torch_engine import images as images_module
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.scoring.vision import VisionProcessor, load_processor
from reflogp.store import sequence_keys
from tests.conftest import write_rows
from tests.versions import skip_before
from tests.vision_models import FAMILIES, encoded, make, pair, picture

#: Of the folders of `family`: some processors cannot be loaded without torchvision.
PROCESSORS = {}
PICTURES = [picture(1), picture(2, (100, 30)), picture(3, (30, 90))]


def rows() -> list[dict]:
    """No image, one, three of different sizes, two, one again in other rows, several completions of a prompt, several turns."""
    turns = [
        {"role": "system", "content": "be short"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "look: "}, {"type": "image"}, {"type": "text", "text": " what?"}],
        },
        {"role": "assistant", "content": "a circle"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and this?"}]},
    ]
    return [
        pair("what is it?", [PICTURES[0]]),
        pair("which of the three?", PICTURES),
        pair("no picture here", []),
        pair("what is it?", [PICTURES[1]]),
        {**pair("", PICTURES[:2]), "prompt": turns},
        pair("and this one? " * 4, [PICTURES[0]], chosen="it is a blue circle, one"),
        pair("what is it?", [PICTURES[0]], chosen="a red square and a blue circle", rejected="shapes"),
        pair("which of the three?", PICTURES, chosen="colours", rejected="one red"),
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "model"
    PROCESSORS[folder] = make(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "llava"
    make("LLaVA", folder)
    return str(folder)


def engine_sequences(folder, data) -> list[Sequence]:
    """Chosen, rejected, chosen, … as the engine gets them."""
    [window] = tokenized(folder, open_dataset(data))
    images = images_for_engine(window)
    found = []
    for at, row in enumerate(window.table.to_pylist()):
        found += [Sequence(row["prompt_ids"], row[side], images=images[at]) for side in ("chosen_ids", "rejected_ids")]
    return found


def tokenized(folder, source) -> TokenizedDataset:
    def load() -> VisionProcessor | None:
        if folder in PROCESSORS:
            return VisionProcessor.of(PROCESSORS[folder], AutoConfig.from_pretrained(folder))
        return load_processor(folder, str(folder))

    return TokenizedDataset(source, lambda: load_tokenizer(str(folder)), load_vision=load)


def plain_forward(folder, data, dtype=torch.float32) -> list[np.ndarray]:
    """The log-probs of each side, from one forward of transformers with the processor's own inputs for each."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    processor = PROCESSORS[folder]
    found = []
    for row in data:
        prompt = row["prompt"]
        if isinstance(prompt[0]["content"], str) and prompt[0]["role"] == "user":
            parts = [{"type": "image"} for _ in row["images"]]
            prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt[0]["content"]}]}]
        begun = processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        for side in ("chosen", "rejected"):
            whole = processor.apply_chat_template(prompt + row[side], tokenize=False)
            assert whole.startswith(begun)
            images = {"images": [row["images"]]} if row["images"] else {}
            inputs = processor(text=[whole], add_special_tokens=False, return_tensors="pt", **images)
            length = len(processor.tokenizer(whole[len(begun) :], add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                logps = model(**inputs).logits[0, :-1].float().log_softmax(-1)
            targets = inputs["input_ids"][0, 1:]
            found.append(logps.gather(1, targets[:, None])[-length:, 0].numpy())
    return found


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_values_are_those_of_a_plain_forward(family, path, monkeypatch):
    if path == "padded":
        monkeypatch.setattr(selfcheck, "layout_of", lambda *args: (False, "of a layout that packs do not have"))
    expected, engine = plain_forward(family, rows()), TorchEngine(str(family), "float32", "cpu")
    warned = pytest.warns(UserWarning, match="padded path.*of a layout that packs do not have")
    with warned if path == "padded" else contextlib.nullcontext():
        found = engine.score(engine_sequences(family, rows()))
    assert engine.image_check.path == path
    assert far(found, expected) <= 1e-4
    engine.token_budget = 40
    assert far(engine.score(engine_sequences(family, rows())), expected) <= 1e-4, "whatever shares the pass"
    others = engine.score(engine_sequences(family, [{**row, "images": [picture(9)] * len(row["images"])} for row in rows()]))
    for number, (one, other) in enumerate(zip(found, others, strict=True)):
        assert (np.abs(one - other).max() > 1e-3) == bool(rows()[number // 2]["images"]), "the images are what is scored"


#: Models of each family, and pairs for each: some 17,000 tokens. The ratio of the errors of two equally good computations that
#: round apart is then 1 with a standard error below 0.006.
SEEDS, PAIRS = 3, 100
_WORDS = ["a", "red", "square", "blue", "circle", "picture", "image", "what", "colours", "shapes", "describe", "please"]


def random_rows(seed: int) -> list[dict]:
    """Of 0 to 3 images, none of which is in two rows."""
    random = np.random.default_rng(seed)

    def text(most: int) -> str:
        return " ".join(random.choice(_WORDS, int(random.integers(3, most))))

    def image():
        width, height = (int(side) for side in random.integers(30, 100, 2))
        return picture(int(random.integers(1 << 30)), (width, height))

    return [pair(text(12), [image() for _ in range([1, 2, 0, 3, 1][n % 5])], text(15), text(15)) for n in range(PAIRS)]


@torch.no_grad()
def values_of_trl(folder, data, dtype, batch: int) -> list[np.ndarray]:
    """Of each side, as DPOTrainer computes those of its reference model."""
    from trl.trainer.utils import add_fused_lm_head  # from TRL 1.13 on

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    add_fused_lm_head(model)
    collator = DataCollatorForVisionPreference(PROCESSORS[folder])
    found = []
    for start in range(0, len(data), batch):
        inputs = collator([dict(row) for row in data[start : start + batch]])
        completions = inputs.pop("completion_mask")
        labels = inputs["input_ids"].masked_fill(completions == 0, -100)
        logps = model(**inputs, labels=labels, use_cache=False, fused_lm_head=True).log_probs
        rows = [row[mask.bool()].float().numpy() for row, mask in zip(logps, completions[:, 1:], strict=True)]
        found += [row for both in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True) for row in both]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_errors_in_bfloat16_are_no_larger_than_trls(name, tmp_path):
    """Than those of TRL's own collator and forward."""
    ours, trls = [], []
    for seed in range(SEEDS):
        folder, data = tmp_path / str(seed), random_rows(seed)
        PROCESSORS[folder] = make(name, folder, seed)
        exact = np.concatenate(values_of_trl(folder, data, torch.float32, batch=1))
        in_batches = np.concatenate(values_of_trl(folder, data, torch.bfloat16, batch=4))
        engine = TorchEngine(str(folder), "bfloat16", "cpu")
        scored = np.concatenate(engine.score(engine_sequences(folder, data)))
        assert engine.image_check.path == "packed"
        ours.append(np.abs(scored - exact))
        trls.append(np.abs(in_batches - exact))
    assert np.mean(np.concatenate(ours)) <= np.mean(np.concatenate(trls))


def test_the_class_that_saved_a_checkpoint_reads_its_images(tmp_path):
    """transformers lists Qwen3.5 as a causal language model too, by a class without a vision tower."""
    PROCESSORS[tmp_path] = make("Qwen3.5", tmp_path)
    expected = plain_forward(tmp_path, rows())
    with pytest.warns(UserWarning, match="Qwen3_5ForConditionalGeneration uses the padded path"):
        engine = TorchEngine(str(tmp_path), "float32", "cpu")
    assert far(engine.score(engine_sequences(tmp_path, rows())), expected) <= 1e-4


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.filterwarnings("ignore:.*padded path")
def test_sequences_of_two_processors_in_one_call_keep_their_own_pixels(path, tmp_path, monkeypatch):
    if path == "padded":
        monkeypatch.setattr(selfcheck, "layout_of", lambda *args: (False, "for this test"))
    make("LLaVA", tmp_path)
    sequences, expected = [], []
    for mean in (0.5, 0.1):
        PROCESSORS[tmp_path] = processor = AutoProcessor.from_pretrained(tmp_path)
        processor.image_processor.image_mean = [mean] * 3
        sequences += engine_sequences(tmp_path, rows())
        expected += plain_forward(tmp_path, rows())
    engine = TorchEngine(str(tmp_path), "float32", "cpu")
    assert far(engine.score(sequences), expected) <= 1e-4
    assert engine.image_check.path == path


@pytest.mark.parametrize("budget", [10_000, 150])
def test_the_vision_tower_runs_once_for_each_distinct_image(budget, family):
    """Over several packs too, and a prompt is computed once for its completions."""
    engine = TorchEngine(str(family), "float32", "cpu", token_budget=budget)
    sequences = engine_sequences(family, rows())
    engine.score(sequences)
    assert budget < 10_000 or engine.token_counts().sharing_gain > 1.4
    seen, base = [], engine._loaded.model.base_model
    tower = next(part for name in ("vision_tower", "vision_model", "visual") if (part := getattr(base, name, None)) is not None)
    tower.register_forward_pre_hook(lambda *args, **kwargs: seen.append(1), with_kwargs=True)
    engine.score(sequences)
    parts = {part.digests for sequence in sequences if sequence.images is not None for part in sequence.images.parts()}
    assert len(seen) == len(parts)


def far(found, expected) -> float:
    """The largest difference of two lists of values."""
    return max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))


def test_a_padded_batch_holds_few_decoded_images(llava, monkeypatch):
    monkeypatch.setattr(selfcheck, "layout_of", lambda *args: (False, "for this test"))
    engine = TorchEngine(llava, "float32", "cpu", token_budget=4096)
    sequences = engine_sequences(llava, rows())
    with pytest.warns(UserWarning, match="padded path"):
        expected = engine.score(sequences)
    limit = sum(image.width * image.height * 3 for image in PICTURES)  # what one row needs
    monkeypatch.setattr(images_module, "DECODED_BYTES", limit - 1)
    batches, padded = [], engine_module.forward_padded

    def seen(head, batch, *args):
        values = padded(head, batch, *args)
        batches.append({picture.digest for entry in batch if entry.images for picture in entry.images.pictures})
        return values

    monkeypatch.setattr(engine_module, "forward_padded", seen)
    assert far(engine.score(sequences), expected) <= 1e-5
    assert engine.token_budget == 4096 and len(batches) > 2
    assert max(map(len, batches)) == len(PICTURES)


def test_the_most_probable_tokens_after_images_are_those_of_the_models_own_logits(llava, monkeypatch):
    sequences = engine_sequences(llava, rows())
    values = TorchEngine(llava, "float32", "cpu").score(sequences)
    engine = TorchEngine(llava, "float32", "cpu", top_k=8)
    packed = engine.score(sequences)
    assert engine.image_check.path == "packed"
    assert far([found.token_logps for found in packed], values) <= 1e-6
    monkeypatch.setattr(selfcheck, "layout_of", lambda *args: (False, "for this test"))
    monkeypatch.setattr(selfcheck, "_padded", lambda *args: 1 / 0)
    alone = TorchEngine(llava, "float32", "cpu", top_k=8)
    with pytest.warns(UserWarning, match="single path"):
        expected = alone.score(sequences)
    assert far([found.logps for found in packed], [found.logps for found in expected]) <= 1e-4


def test_an_engine_whose_check_of_images_failed_still_returns_the_most_probable_tokens(llava, monkeypatch):
    engine = TorchEngine(llava, "float32", "cpu", top_k=8)
    sequences = engine_sequences(llava, rows())
    with monkeypatch.context() as failing:
        failing.setattr("reflogp.scoring.torch_engine.engine.check_images", lambda *args: {}["no such layer"])
        with pytest.raises(EngineError, match="could not be scored"):
            engine.score(sequences)
    assert all(found.ids.shape == (len(found.token_logps), 8) for found in engine.score(sequences))


def test_a_kernel_that_fails_for_images_is_not_used_for_them(llava, monkeypatch):
    expected = TorchEngine(llava, "float32", "cpu").score(engine_sequences(llava, rows()))
    engine = TorchEngine(llava, "float32", "cpu")

    def broken(layout, call):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(attention, "_CPU_KERNELS", (attention._Kernel(broken, lambda: True, lambda call: None),))
    found = engine.score([sequence for sequence in engine_sequences(llava, rows()) if sequence.images is not None])
    assert (engine.image_check.path, engine.image_check.refused_kernels) == ("packed", ("broken",))
    assert far(found, [values for number, values in enumerate(expected) if rows()[number // 2]["images"]]) <= 1e-5


# Keys


def keys_of(folder, data) -> list[bytes]:
    [window] = tokenized(folder, open_dataset(data))
    assert not window.problems, window.problems
    return sequence_keys(window.table["prompt_ids"], window.table["chosen_ids"]).to_pylist()


def of_two_frames() -> bytes:
    sink = io.BytesIO()
    PICTURES[0].save(sink, "PNG", save_all=True, append_images=[picture(9)])
    return sink.getvalue()


def turned() -> bytes:
    """A file that says that its image is shown turned by 90 degrees clockwise."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(PICTURES[0].transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)


def test_a_key_is_of_pixels_and_not_of_files(llava):
    forms = [PICTURES[0], *(encoded(PICTURES[0], form) for form in ("PNG", "BMP", "TIFF")), of_two_frames(), turned()]
    forms.append(encoded(PICTURES[0], "WEBP", lossless=True))
    assert len(set(keys_of(llava, [pair("what?", [form]) for form in forms]))) == 1
    gray = PICTURES[0].convert("L")
    data = Dataset.from_list([pair("what?", [{"bytes": encoded(gray, "PNG"), "path": None}])])
    as_rgb, as_it_is = (data.cast_column("images", List(ImageFeature(mode=mode))) for mode in ("RGB", None))
    assert keys_of(llava, as_rgb) == keys_of(llava, [pair("what?", [gray.convert("RGB")])]) != keys_of(llava, as_it_is)


def test_one_pixel_another_order_and_other_settings_are_other_keys(llava, tmp_path):
    other = PICTURES[0].copy()
    other.putpixel((3, 3), tuple(255 - value for value in other.getpixel((3, 3))))
    images = [[PICTURES[0]], [other], [PICTURES[0], PICTURES[1]], [PICTURES[1], PICTURES[0]], [PICTURES[0].convert("L")], []]
    keys = keys_of(llava, [pair("what?", entry) for entry in images])
    assert len(set(keys)) == len(images)
    changed = Path(shutil.copytree(llava, tmp_path / "changed"))
    processor = AutoProcessor.from_pretrained(llava)
    processor.image_processor.image_mean = [0.4, 0.4, 0.4]
    processor.save_pretrained(changed)
    assert not set(keys_of(changed, [pair("what?", entry) for entry in images[:-1]])) & set(keys)
    assert keys_of(changed, [pair("what?", [])]) == keys[-1:], "text depends on no image processor"


# Forms of data


def test_every_form_of_a_dataset_gives_the_same_values(llava, tmp_path):
    image = PICTURES[0]
    (tmp_path / "data" / "sub").mkdir(parents=True)
    png = encoded(image, "PNG")
    (tmp_path / "data" / "sub" / "a.png").write_bytes(png)
    plain = pair("what?", [])
    del plain["images"]
    uri = "data:image/png;base64," + base64.b64encode(png).decode()
    lines = [
        {**plain, "images": ["sub/a.png"]},
        {**plain, "images": [uri]},
        {**plain, "images": [str(tmp_path / "data/sub/a.png")]},
    ]
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    struct_type = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    columns = {name: [value] for name, value in plain.items()}
    table = pa.table({**columns, "images": pa.array([[{"bytes": png, "path": None}]], struct_type)})
    pq.write_table(table, tmp_path / "data" / "rows.parquet")
    of_datasets = Dataset.from_list([{**plain, "images": [png]}]).cast_column("images", List(ImageFeature()))
    single = Dataset.from_list([{**plain, "image": {"bytes": png, "path": None}}]).cast_column("image", ImageFeature())
    first = score(llava, str(tmp_path / "data" / "rows.jsonl"), tmp_path / "store", dtype="float32", progress=False)
    assert (first.scored, first.duplicates, first.bad_rows) == (2, 4, 0)
    datasets = [
        str(tmp_path / "data" / "rows.parquet"),
        of_datasets,
        single,
        single.to_iterable_dataset(),
        table,
        table.to_pylist(),
    ]
    of_datasets.save_to_disk(tmp_path / "saved")
    for data in [*datasets, str(tmp_path / "saved")]:
        again = score(llava, data, tmp_path / "store", dtype="float32", progress=False)
        assert (again.hits, again.scored, again.bad_rows) == (2, 0, 0), data
    joined = join(llava, of_datasets, tmp_path / "store", dtype="float32")
    assert joined.features["images"] == of_datasets.features["images"] and joined[0]["images"][0].size == image.size
    assert np.isfinite(joined["ref_chosen_logps"][0])


@pytest.mark.parametrize("form", ["a path", "a list", "plain text"])
@pytest.mark.parametrize("first", ["absent", "null", "null image"])
def test_images_may_begin_after_the_first_window(first, form, llava, tmp_path, monkeypatch):
    """Every row has the same key, whether rows without an image have an empty list, null or no column."""
    monkeypatch.setattr(tokenize_module, "tokenize_dataset", partial(tokenize_dataset, window=4))
    uris = ["data:image/png;base64," + base64.b64encode(encoded(entry, "PNG")).decode() for entry in PICTURES]
    wanted = [pair(f"what is {n}?", []) for n in range(10)] + [pair(f"what is {n}?", [uri]) for n, uri in enumerate(uris)]
    if form == "plain text":
        wanted = [{**row, "prompt": "<image>" * len(row["images"]) + "say:", "chosen": "a", "rejected": "b"} for row in wanted]
    given = [{name: value for name, value in row.items() if name != "images" or value} for row in wanted]
    if first != "absent":
        given = [{"images" if first == "null" else "image": None, **row} for row in given]
    found, expected = (
        list(tokenized(llava, open_dataset(str(write_rows(tmp_path / "rows.jsonl", some)) if form == "a path" else some)))
        for some in (given, wanted)
    )
    assert len(found) == 4 and not any(window.problems for window in found)
    assert [window.table for window in found] == [window.table for window in expected]


def test_columns_of_images_that_begin_too_late_are_refused_by_name(llava, tmp_path, monkeypatch):
    """In the last file alone, and in a stream."""
    monkeypatch.setattr(tokenize_module, "tokenize_dataset", partial(tokenize_dataset, window=4))
    row = {name: value for name, value in pair("what?", []).items() if name != "images"}
    late = {**row, "images": [encoded(PICTURES[0], "PNG")]}
    for number, some in enumerate(([row] * 6, [late])):
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"{number}.parquet")
    says = "1.parquet cannot be read as parquet from row 6 on: the columns are .*images.*, but those of the first rows are"
    with pytest.raises(DatasetError, match=says):
        list(tokenized(llava, RowSource(str(tmp_path))))
    windows = iter(tokenized(llava, open_dataset(IterableDataset.from_generator(lambda: iter([*[row] * 5, late])))))
    assert len(next(windows).table) == 4
    with pytest.raises(DatasetError, match="row 5 is the first row of the stream with a column of images"):
        next(windows)


def test_a_dataset_of_text_needs_no_image_processor_that_loads(llava, tmp_path, monkeypatch):
    shutil.copytree(llava, tmp_path / "model")
    (tmp_path / "model" / "processor_config.json").write_text("{")
    text = {name: value for name, value in pair("what?", []).items() if name != "images"}
    [window] = tokenized(tmp_path / "model", open_dataset([text]))
    assert not window.problems and window.vision is None
    monkeypatch.setattr(tokenize_module, "tokenize_dataset", partial(tokenize_dataset, window=1))
    with pytest.raises(TokenizerError, match="image processor cannot be loaded"):
        list(tokenized(tmp_path / "model", open_dataset([text, pair("what?", [encoded(PICTURES[0], "PNG")])])))


def test_a_report_shows_small_copies_without_metadata(llava, tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "a secret"
    large = encoded(picture(5, (900, 700)), "PNG", exif=exif)
    alike = {"chosen": "a red square " * 12 + "one", "rejected": "a red square " * 12 + "circle"}  # such pairs are shown
    data = [pair("what?", [large], **alike), pair("which?", [large], **alike), pair("and?", [PICTURES[0], PICTURES[1]])]
    score(llava, data, tmp_path / "store", dtype="float32", progress=False)
    report(llava, data, tmp_path / "store", tmp_path / "report", dtype="float32", progress=False)
    page = (tmp_path / "report" / "index.html").read_text()
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="image 1 of row ([01])">', page)
    assert {row for _, row in found} == {"0", "1"} and "⟨image, 16 tokens⟩" in page and "img-src data:" in page
    for text, _ in found:
        small = Image.open(io.BytesIO(base64.b64decode(text)))
        assert max(small.size) == 240 and not small.getexif() and b"secret" not in base64.b64decode(text)


# Images that cannot be used


def bad_images(tmp_path) -> dict[str, tuple[dict, str]]:
    png = encoded(PICTURES[0], "PNG")
    os.mkfifo(tmp_path / "fifo.png")
    user = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    own = [{"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "?"}]}]
    tool = [{"role": "user", "content": [{"type": "text", "text": "?"}]}, {"role": "tool", "content": [{"type": "image"}]}]
    video = [{"role": "user", "content": [{"type": "image"}, {"type": "video"}]}]
    return {
        "cut pixels": (pair("?", [encoded(PICTURES[0], "JPEG")[:-200]]), "decoded"),
        "no image": (pair("?", [b"hello"]), "decoded"),
        "null": (pair("?", [None]), "expected bytes"),
        "a missing file": (pair("?", [str(tmp_path / "none.png")]), "cannot be read"),
        "a folder": (pair("?", [str(tmp_path)]), "cannot be read"),
        "a pipe": (pair("?", [str(tmp_path / "fifo.png")]), "not a file"),
        "a device without end": (pair("?", ["/dev/zero"]), "not a file"),
        "another format": (pair("?", [encoded(PICTURES[0], "PPM")]), "not an image in one of the formats"),
        "a plain URI": (pair("?", ["data:image/png,abc"]), "without base64"),
        "a zero byte in a path": (pair("?", ["a\0b"]), "cannot be read"),
        "more placeholders": ({**pair("?", []), "prompt": user}, "1 placeholder"),
        "fewer placeholders": ({**pair("?", [png, png]), "prompt": user}, "2 images"),
        "an own image": ({**pair("?", [png]), "prompt": own}, "contains an image"),
        "an image of a tool": ({**pair("?", [png]), "prompt": tool}, "the role tool contains an image"),
        "a video": ({**pair("?", [png]), "prompt": video}, "a content part of type video, but only text and images"),
        "a column of audio": ({**pair("?", [png]), "audio": {"bytes": b"RIFF", "path": None}}, "column audio"),
        "processed pixels": ({**pair("?", [png]), "pixel_values": [[0.5]]}, "column pixel_values"),
        "a placeholder in the answer": (pair("?", [png], chosen="see <image>"), "the processor fails for this row"),
        "no prompt": ({name: value for name, value in pair("?", [png]).items() if name != "prompt"}, "needs a prompt"),
        "an unknown role": ({**pair("?", [png]), "prompt": [{"role": "critic", "content": "?"}]}, "role"),
    }


def test_rows_whose_images_cannot_be_used_are_named_and_the_others_go_on(llava, tmp_path):
    skip_before("transformers", "5.23", "has processors that take placeholders in an answer")
    bad = bad_images(tmp_path)
    data = [pair("good", [PICTURES[0]]), *(row for row, _ in bad.values()), pair("good too", [PICTURES[1]])]
    [window] = tokenized(llava, open_dataset(data))
    assert window.table["row"].to_pylist() == [0, len(data) - 1]
    for number, (name, (_, words)) in enumerate(bad.items(), 1):
        assert words in window.problems[number], (name, window.problems[number])
        assert len(window.problems[number]) < 600


def test_a_length_that_cuts_an_image_is_a_problem(llava):
    [sequence, _] = engine_sequences(llava, [pair("what?", PICTURES[:2])])
    cut = Sequence(sequence.prompt_ids[:24], sequence.completion_ids, images=sequence.images)
    [problem] = TorchEngine(llava, "float32", "cpu").problems([cut]).values()
    assert "max_length cuts" in problem


def test_a_file_that_changes_before_it_is_scored_leaves_out_its_rows(llava, tmp_path):
    """In the first pass, which is checked, and in later ones; removed files too."""
    names = [tmp_path / f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        name.write_bytes(encoded(picture(number), "PNG"))
    data = [pair(f"what is {number}?", [str(name)]) for number, name in enumerate(names)]
    sequences = engine_sequences(llava, data)
    engine = TorchEngine(llava, "float32", "cpu")
    expected = engine.score(sequences)
    names[1].write_bytes(encoded(PICTURES[1], "PNG"))
    names[3].unlink()
    for scorer in (TorchEngine(llava, "float32", "cpu"), engine):
        with pytest.raises(InvalidSequencesError) as raised:
            scorer.score(sequences)
        assert set(raised.value.problems) == {2, 3, 6, 7}
        assert "was changed after it was read" in raised.value.problems[2] and "cannot be read" in raised.value.problems[6]
        for at in (0, 1, 4, 5):
            assert np.abs(raised.value.results[at] - expected[at]).max() <= 1e-4


def test_an_adapter_of_a_vision_model_is_a_reference(llava, tmp_path):
    base = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32)
    adapter = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapter.save_pretrained(tmp_path / "adapter")
    data = [pair("what?", [PICTURES[0]])]
    joined_to = tmp_path / "store"
    assert score(str(tmp_path / "adapter"), data, joined_to, dtype="float32", progress=False).scored == 2
    [row] = join(str(tmp_path / "adapter"), data, joined_to, dtype="float32")
    fresh = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32)
    PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().eval().save_pretrained(tmp_path / "merged")
    PROCESSORS[tmp_path / "merged"] = AutoProcessor.from_pretrained(llava)
    expected = plain_forward(tmp_path / "merged", data)
    assert [row["ref_chosen_logps"], row["ref_rejected_logps"]] == pytest.approx([v.sum() for v in expected], abs=1e-3)
