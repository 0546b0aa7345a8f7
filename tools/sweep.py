"""Score with a tiny model of every class that transformers lists for text, and write the outcomes to docs/fidelity.md.

`make sweep` writes the section; tests/scoring/test_sweep.py asserts the same outcomes.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from tools.fidelity import SWEEP, TABLE
from tools.tiny_models import tiny_model

#: Largest difference of a sum of log-probs, in nats. The sums are about a thousand nats.
LARGEST = 1e-3


@dataclass(frozen=True)
class Listed:
    """A class that transformers lists for a type of model."""

    model_type: str
    name: str
    auto_class: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.model_type})"


@dataclass(frozen=True)
class Outcome:
    """What became of a class.

    Attributes:
        path: how the engine scored it.
        difference: largest difference between a sum of log-probs and that of plain forward passes, in nats.
        reason: the engine's error, or why transformers builds no tiny model.
    """

    kind: Literal["ok", "wrong", "refused", "not built"]
    path: str = ""
    difference: float = 0.0
    reason: str = ""


def listed_classes() -> list[Listed]:
    """Return every class for causal language modeling, then those for text from images and text that are not among them."""
    causal = [Listed(kind, name, AutoModelForCausalLM) for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()]
    seen = {(listed.model_type, listed.name) for listed in causal}
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    return causal + [Listed(*item, AutoModelForImageTextToText) for item in with_images if item not in seen]


#: Part of the engine's error -> the classes that the engine refuses with it.
REFUSED = {
    "is an encoder-decoder model": (
        "Florence2ForConditionalGeneration (florence2)",
        "PPFormulaNetForConditionalGeneration (pp_formulanet)",
        "Pix2StructForConditionalGeneration (pix2struct)",
        "T5Gemma2ForConditionalGeneration (t5gemma2)",
        "UdopForConditionalGeneration (udop)",
        "VisionEncoderDecoderModel (vision-encoder-decoder)",
    ),
    "is not a causal language model": (
        "CpmAntForCausalLM (cpmant)",
        "DiffusionGemmaForBlockDiffusion (diffusion_gemma)",
        "XLMWithLMHeadModel (xlm)",
        "XLNetLMHeadModel (xlnet)",
    ),
    "pixel_values": (
        "Blip2ForConditionalGeneration (blip-2)",
        "BlipForConditionalGeneration (blip)",
        "IdeficsForVisionText2Text (idefics)",
        "InstructBlipForConditionalGeneration (instructblip)",
        "InstructBlipVideoForConditionalGeneration (instructblipvideo)",
        "Kosmos2ForConditionalGeneration (kosmos-2)",
    ),
    "object has no attribute 'hidden_size'": ("BltForCausalLM (blt)", "PI0ForConditionalGeneration (pi0)"),
    "weights are missing from the files": ("Gemma3ForConditionalGeneration (shieldgemma2)",),
}
#: Part of the error of transformers -> the classes of which it builds no model here, or loads none that it has saved.
NOT_BUILT = {
    "requires the timm library": (
        "FastVlmForConditionalGeneration (fast_vlm)",
        "Gemma3nForConditionalGeneration (gemma3n)",
        "PerceptionLMForConditionalGeneration (perception_lm)",
    ),
    "No module named 'scipy'": ("InklingForConditionalGeneration (inkling_mm_model)",),
    "Unrecognized configuration class": (
        "Emu3ForCausalLM (emu3)",
        "EvollaForProteinText2Text (evolla)",
        "MllamaForCausalLM (mllama)",
    ),
    "has no attribute 'dropout'": ("MusicgenForCausalLM (musicgen)", "MusicgenMelodyForCausalLM (musicgen_melody)"),
    "The set of layer types producing a cache": (
        "Gemma4AssistantForCausalLM (gemma4_assistant)",
        "Gemma4UnifiedAssistantForCausalLM (gemma4_unified_assistant)",
    ),
}


def expected(listed: Listed) -> tuple[str, str]:
    """Return the kind of the outcome of a class, and a part of its reason."""
    for kind, table in (("refused", REFUSED), ("not built", NOT_BUILT)):
        for part, classes in table.items():
            if str(listed) in classes:
                return kind, part
    return "ok", ""


def some_sequences() -> list[Sequence]:
    """Return sequences of different lengths, two pairs of them with the same prompt."""
    draw = random.Random(1)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 120) for _ in range(count)]

    first, second = ids(23), ids(40)
    pairs = [Sequence(first, ids(12)), Sequence(first, ids(5)), Sequence(second, ids(9)), Sequence(second, ids(20))]
    return [*pairs, Sequence(ids(4), ids(3))]


def plain_sum(model: Any, sequence: Sequence) -> float:
    """Return the sum of a completion's log-probs from one unpadded float32 forward pass of the model itself."""
    ids = torch.from_numpy(sequence.ids())
    with torch.no_grad():
        logps = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    completion = range(len(sequence.prompt_ids), len(sequence))
    return sum(float(logps[at - 1, ids[at]]) for at in completion)


def measure(listed: Listed) -> Outcome:
    """Build a tiny model of the class, save it, and score some sequences with the engine and with the class itself."""
    sequences = some_sequences()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tiny_model(listed.model_type, listed.auto_class).save_pretrained(folder)
            model = listed.auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        except Exception as error:
            return Outcome("not built", reason=" ".join(str(error).split()))
        try:
            engine = TorchEngine(folder, "float32")
            found = [float(np.sum(values, dtype=np.float64)) for values in engine.score(sequences)]
        except EngineError as error:
            return Outcome("refused", reason=str(error).replace(folder, "FOLDER"))
        differences = [abs(ours - plain_sum(model, sequence)) for ours, sequence in zip(found, sequences, strict=True)]
    largest = max(differences)
    return Outcome("ok" if largest <= LARGEST else "wrong", engine.self_check.path, largest)


def section() -> list[str]:
    """Measure every class, and return the lines of the section of docs/fidelity.md."""
    found = {listed: measure(listed) for listed in listed_classes()}
    counts = Counter(outcome.kind for outcome in found.values())
    ok = {listed: outcome for listed, outcome in found.items() if outcome.kind == "ok"}
    paths = Counter(outcome.path for outcome in ok.values())
    lines = [
        SWEEP,
        "",
        f"transformers {transformers.__version__} lists {len(found)} pairs of a config and a class for causal language",
        "modeling or for text from images and text. For each, a tiny model was built from the defaults of its config,",
        "with one layer of each kind and with random weights, norms and biases (`tools/tiny_models.py`; BERT and its like",
        "with `is_decoder`). Its last norm is so large that a log-prob is tens of nats below zero. The engine scored five",
        "sequences of text, some with the same prompt. Each sum of log-probs was compared with that of an unpadded",
        f"float32 forward pass of the class itself, with eager attention. A difference above {LARGEST:g} nats is wrong.",
        "`make sweep` writes this section, and `make test-slow` asserts the same outcomes. Other tests compare sequences",
        "with [images](images.md): of LLaVA, Gemma 3, Idefics 3, SmolVLM, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5,",
        "InternVL and LLaVA-OneVision.",
        "",
        "| outcome | classes |",
        "| --- | --- |",
        f"| tried | {len(found)} |",
        f"| scored ({', '.join(f'{paths[path]} {path}' for path in ('packed', 'padded', 'single'))}) | {counts['ok']} |",
        f"| refused with an error | {counts['refused']} |",
        f"| wrong | {counts['wrong']} |",
        f"| not built | {counts['not built']} |",
        "",
        f"The largest difference of a sum is {max(outcome.difference for outcome in ok.values()):.1e} nats.",
        "",
    ]
    for path in ("packed", "padded", "single"):
        names = sorted({listed.name for listed, outcome in ok.items() if outcome.path == path}, key=str.lower)
        lines += [f"- *{path}*: {', '.join(f'`{name}`' for name in names)}"]
    for kind, title in (("wrong", "wrong"), ("refused", "error of the engine"), ("not built", "error of transformers")):
        chosen = {listed: outcome for listed, outcome in found.items() if outcome.kind == kind}
        if chosen:
            lines += ["", f"| class (config) | {title} |", "| --- | --- |"]
            lines += [f"| {listed} | {_in_a_cell(outcome)} |" for listed, outcome in chosen.items()]
    return lines


def _in_a_cell(outcome: Outcome) -> str:
    if outcome.kind == "wrong":
        return f"{outcome.difference:.1e} nats on the {outcome.path} path"
    reason = outcome.reason.replace("|", " ")
    return reason if len(reason) <= 240 else reason[:240] + " …"


def write_section() -> None:
    """Replace the last section of docs/fidelity.md."""
    before = TABLE.read_text(encoding="utf-8").partition(f"\n{SWEEP}\n")[0]
    TABLE.write_text(before.rstrip() + "\n\n" + "\n".join(section()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_section()
