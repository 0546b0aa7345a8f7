"""vLLM's values of pairs with images are those of a plain float32 forward, or their rows are refused."""

import importlib.util
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import transformers as tf
from safetensors.torch import load_file, save_file

from reflogp.scoring import EngineChoice, score
from reflogp.scoring.errors import InvalidSequencesError
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.scoring.vllm_engine.answers import Request
from reflogp.scoring.wire import SentImages
from reflogp.store.images import FIRST_IMAGE_ID
from tests import vision_models
from tests.scoring.test_images import PROCESSORS, engine_sequences, plain_forward, rows
from tests.vision_models import encoded, pair, picture
from tests.vllm.conftest import VLLM_PYTHON, load

pytestmark = pytest.mark.vllm

#: Largest difference from a plain forward, nats per token. These models' log-probs are around -7, so float32 leaves about 1e-5.
NEAR = 1e-4
#: vLLM's CPU attention wants heads of 32 at least.
_WIDER = ((vision_models.TEXT, {"hidden_size": 128}), (vision_models._SIGHT, {"hidden_size": 64}))
#: Families that vLLM imports only with torchvision, which `make setup-vllm` leaves out where it was built for another torch.
_WITH_TORCHVISION = ("LLaVA", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Gemma 3")


@cache
def both_have_torchvision() -> bool:
    here = importlib.util.find_spec("torchvision") is not None
    return here and subprocess.run([VLLM_PYTHON, "-c", "import torchvision"], capture_output=True).returncode == 0


def make(family: str, folder: Path) -> Path:
    """Write a model that vLLM's kernels on a CPU can run, with its processor."""
    if family in _WITH_TORCHVISION and not both_have_torchvision():
        pytest.skip(f"{family} needs torchvision here and in vLLM's environment")
    with pytest.MonkeyPatch.context() as patch:
        for sizes, wider in _WIDER:
            for name, value in wider.items():
                patch.setitem(sizes, name, value)
        processor = vision_models.make(family, folder)
    if family not in vision_models.LOADABLE:  # their processors are whole only with torchvision
        part = {"patch_size": processor.image_processor.patch_size}
        image_processor = tf.Qwen2VLImageProcessor(size=dict(processor.image_processor.size), **part)
        whole = type(processor)(image_processor, processor.tokenizer, tf.Qwen2VLVideoProcessor(**part))
        whole.chat_template = processor.chat_template
        whole.save_pretrained(folder)
    if family in ("LLaVA", "Gemma 3"):  # vLLM reads the names of published checkpoints
        weights = load_file(folder / "model.safetensors")
        tower = "vision_tower."
        named = {name.replace(tower, f"{tower}vision_model."): tensor for name, tensor in weights.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    PROCESSORS[folder] = tf.AutoProcessor.from_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["Idefics 3", "LLaVA", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL"])
def family(request, tmp_path_factory):
    """(model folder, engine) of a family that vLLM answers right."""
    folder = make(request.param, tmp_path_factory.mktemp("vision") / "model")
    engine = load(folder)
    yield folder, engine
    engine.close()


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory):
    folder = make("Idefics 3", tmp_path_factory.mktemp("vision") / "idefics3")
    engine = load(folder)
    yield folder, engine
    engine.close()


def request(sequence, padding=0) -> Request:
    """What the engine asks for a sequence, with tokens in front of it."""
    images = sequence.images
    files = tuple(image.encoded() for image in images.pictures)
    sent = SentImages(images.digests, images.counts, files, images.vision.image_token_id)
    ids = np.concatenate([np.full(padding, 5), sequence.ids()])
    return Request(ids, padding + len(sequence.prompt_ids), True, sent)


def largest(values, folder, data) -> float:
    """Largest difference from a plain forward of transformers with the processor's own inputs."""
    return max(np.abs(ours - plain).max() for ours, plain in zip(values, plain_forward(folder, data), strict=True))


def test_values_are_a_plain_forwards(family):
    """One image, three of different sizes, none, the same image in several rows, and two in different turns."""
    folder, engine = family
    sequences = engine_sequences(folder, rows())
    assert engine.problems(sequences) == {}
    assert largest(engine.score(sequences), folder, rows()) <= NEAR
    assert engine.retries == 0 and engine.restarts == 0
    assert engine.provenance()["prefix_cache"] is True


def test_swapped_and_other_images_have_other_values_and_the_right_ones(family):
    folder, engine = family
    one, two = picture(4, (64, 48)), picture(5, (64, 48))
    data = [pair("which of the two?", images) for images in ([one, two], [two, one], [one, one])]
    values = engine.score(engine_sequences(folder, data))
    assert largest(values, folder, data) <= NEAR
    for side in (0, 1):
        for other in (2, 4):
            assert np.abs(values[side] - values[side + other]).max() > 1e-2


def test_images_that_vllms_steps_divide(idefics3):
    """A step has fewer tokens than an image, so features are put into their places in parts; with the cache and without."""
    folder, _ = idefics3
    for caching in (True, False):
        engine = load(folder, vllm_options={"max_num_batched_tokens": 48, "max_num_seqs": 3, "enable_prefix_caching": caching})
        try:
            assert largest(engine.score(engine_sequences(folder, rows())), folder, rows()) <= NEAR
        finally:
            engine.close()


def test_images_of_other_modes(idefics3):
    folder, engine = idefics3
    modes = ("L", "RGBA", "P")
    data = [pair("what is it?", [picture(6).convert(mode)]) for mode in modes]
    assert largest(engine.score(engine_sequences(folder, data)), folder, data) <= NEAR


def test_a_cached_prefix_ends_where_the_images_differ(idefics3):
    """The same image is read from the cache, another image of the same size is not, though its token ids are equal."""
    folder, engine = idefics3
    one, two = picture(7, (64, 48)), picture(8, (64, 48))
    data = [pair("what is it?", [one]), pair("what is it?", [two])]
    asked = [request(sequence) for sequence in engine_sequences(folder, data)[:3]]
    assert np.array_equal(asked[0].model_ids()[: asked[0].prompt_len], asked[2].model_ids()[: asked[2].prompt_len])
    cached = [next(engine._transport.ask([asked[at]], "same")).cached for at in range(3)]
    starts = np.flatnonzero(asked[0].ids >= FIRST_IMAGE_ID)[0]
    assert cached[0] == 0 and cached[1] > starts + 32
    assert cached[2] <= starts


def test_an_image_whose_tokens_vllm_would_not_make_is_refused(idefics3):
    folder, engine = idefics3
    [sequence, other] = engine_sequences(folder, [pair("what is it?", [picture(1)])])
    ids = np.array(sequence.prompt_ids)
    places = np.flatnonzero(ids >= FIRST_IMAGE_ID)
    between = next(at for at in range(places[0], places[-1]) if ids[at] < FIRST_IMAGE_ID)
    ids[between] += 1
    changed = Sequence(ids, sequence.completion_ids, images=sequence.images)
    with pytest.raises(InvalidSequencesError, match="different tokens for an image") as caught:
        engine.score([changed, other])
    assert list(caught.value.problems) == [0] and len(caught.value.results[1])


def test_what_vllm_itself_refuses_is_an_answer_and_not_its_end(idefics3):
    folder, engine = idefics3
    [sequence, other] = engine_sequences(folder, [pair("what is it?", [picture(1)])])
    too_long, right = request(sequence, padding=2000), request(other)
    answers = {answer.at: answer for answer in engine._transport.ask([too_long, right], "long")}
    assert "vLLM refuses the sequence" in answers[0].problem and answers[0].values is None
    assert answers[1].problem is None and len(answers[1].values) == len(other.completion_ids)
    assert engine.restarts == 0


def test_an_image_processor_with_other_settings_is_refused(idefics3, tmp_path):
    """The number of tokens is the same, so only the settings tell."""
    folder, engine = idefics3
    changed = tf.AutoProcessor.from_pretrained(folder)
    changed.image_processor.image_mean = [0.1, 0.2, 0.3]
    PROCESSORS[tmp_path] = changed
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    sequences = engine_sequences(tmp_path, [pair("what is it?", [picture(1)]), pair("no picture", [])])
    problems = engine.problems(sequences)
    assert list(problems) == [0, 1]
    assert "different settings" in problems[0] and "use --engine torch" in problems[0]


def test_a_file_that_changes_leaves_out_its_rows_alone(idefics3, tmp_path):
    folder, engine = idefics3
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, file in enumerate(files):
        file.write_bytes(encoded(picture(seed), "PNG"))
    sequences = engine_sequences(folder, [pair("what?", [str(file)]) for file in files])
    files[0].write_bytes(encoded(picture(9), "PNG"))
    with pytest.raises(InvalidSequencesError) as caught:
        engine.score(sequences)
    assert list(caught.value.problems) == [0, 1] and all("changed" in text for text in caught.value.problems.values())
    assert all(len(caught.value.results[at]) for at in (2, 3))


def test_a_run_stores_values_that_the_torch_engine_then_finds(idefics3, tmp_path):
    folder, _ = idefics3
    store = str(tmp_path / "store")
    choice = EngineChoice("vllm", vllm_python=str(VLLM_PYTHON))
    data = rows()
    first = score(str(folder), data, store, dtype="float32", engine=choice, progress=False)
    assert first.bad_rows == 0 and first.scored == first.sequences - first.duplicates > 0
    assert first.provenance["engine"] == "vllm"
    second = score(str(folder), data, store, dtype="float32", progress=False)
    assert second.scored == 0


def test_a_family_that_vllm_computes_otherwise_is_refused_by_name(tmp_path):
    folder = make("Gemma 3", tmp_path / "gemma3")
    engine = load(folder)
    try:
        data = [pair("what is it?", [picture(1)]), pair("no picture", [])]
        sequences = engine_sequences(folder, data)
        problems = engine.problems(sequences)
        assert list(problems) == [0, 1]
        assert "gemma3" in problems[0] and "use --engine torch" in problems[0]
        values = engine.score(sequences[2:])
        assert max(np.abs(a - b).max() for a, b in zip(values, plain_forward(folder, data[1:]), strict=True)) <= NEAR
    finally:
        engine.close()


def test_a_folder_without_an_image_processor_scores_text_alone(idefics3, tmp_path):
    folder, _ = idefics3
    for file in folder.iterdir():
        if file.name != "processor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    engine = load(tmp_path)
    try:
        sequences = engine_sequences(folder, [pair("what is it?", [picture(1)]), pair("no picture", [])])
        assert "image processor that vLLM needs for images is missing" in engine.problems(sequences)[0]
        assert largest(engine.score(sequences[2:]), folder, [pair("no picture", [])]) <= NEAR
    finally:
        engine.close()
