"""What is compared: our engine, TRL's own precomputation, a plain padded transformers loop, vLLM. One function each.

Every side gets the same model folder and the same pairs, and answers with its seconds. Used by scoring.py and gpu.py.
"""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from reflogp_client.cli.console import quiet_libraries
from reflogp_client.cli.demo_model import train_tokenizer
from reflogp_service.data.encode import tokenize_examples
from reflogp_service.data.shape import examples_of
from reflogp_service.engine import Sequence, TorchEngine
from reflogp_service.engines import Engine, EngineChoice
from reflogp_store import describe_reference

REPOSITORY = Path(__file__).resolve().parent.parent
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"

#: Shapes of Qwen2 models: hidden, intermediate, layers, heads, key heads.
SHAPES = {
    "tiny": (128, 384, 4, 4, 2),
    "20M": (384, 1024, 6, 6, 2),
    "0.1B": (768, 2048, 12, 12, 4),
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "7B": (3584, 18944, 28, 28, 4),
}


@dataclass(frozen=True)
class Pairs:
    """Preference pairs as token ids: rows of (prompt, chosen, rejected)."""

    name: str
    rows: list[tuple[list[int], list[int], list[int]]]

    @property
    def tokens(self) -> int:
        """Tokens of both sequences of every pair, nothing shared and nothing padded."""
        return sum(2 * len(p) + len(c) + len(r) for p, c, r in self.rows)

    def sequences(self) -> list[Sequence]:
        return [Sequence(p, side) for p, c, r in self.rows for side in (c, r)]

    def spread(self, count: int) -> Pairs:
        """`count` rows at even distances, so that their lengths are those of the whole."""
        step = max(1, len(self.rows) // count)
        return Pairs(self.name, self.rows[::step][:count])


def read_pairs(file: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` rows of a JSON lines file, compressed or not."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in text.splitlines()[:count]]


def tokenize(name: str, rows: list[dict[str, Any]], tokenizer: Any) -> Pairs:
    examples = [example for row in rows for example in examples_of(row, "preference")]
    found = tokenize_examples(examples, tokenizer)
    return Pairs(name, [(p, c, r) for p, (c, r) in found if len(c) and len(r)])


def make_tokenizer(rows: list[dict[str, Any]], vocab_size: int = 32_000) -> Any:
    """A tokenizer of the benchmark's own texts."""
    sides = (row[name] for row in rows for name in ("prompt", "chosen", "rejected"))
    texts = [m["content"] for side in sides for m in (side if isinstance(side, list) else [{"content": side}])]
    return train_tokenizer(texts, vocab_size)


def make_model(folder: Path, shape: str, vocab_size: int = 32_000, device: str = "cpu") -> int:
    """A Qwen2 of this shape with random weights in bfloat16, as a checkpoint; returns its number of parameters."""
    hidden, intermediate, layers, heads, key_heads = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=shape != "7B",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def synchronized(device: str) -> float:
    """The time, after the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def quiet() -> None:
    """No progress bars and notices between the measurements."""
    import os

    from datasets import disable_progress_bars

    os.environ["TQDM_DISABLE"] = "1"
    disable_progress_bars()
    quiet_libraries()


class Ours:
    """reflogp's engine, loaded (and compiled) before the clock starts."""

    name = "reflogp"

    def __init__(self, model: Path, device: str) -> None:
        self.engine = TorchEngine(str(model), "bfloat16", device)
        self._device = device

    def seconds(self, pairs: Pairs) -> float:
        start = synchronized(self._device)
        self.engine.score(pairs.sequences())
        return synchronized(self._device) - start


class OursWithVllm:
    """reflogp's vLLM engine in its own environment, its prefix cache on."""

    name = "reflogp, vllm engine"

    def __init__(self, model: Path) -> None:
        choice = EngineChoice("vllm", vllm_python=str(VLLM_PYTHON))
        self._engine = choice.make(str(model), describe_reference(str(model)))

    def seconds(self, pairs: Pairs) -> float:
        return _drained(self._engine, pairs)


class OursWithServer:
    """reflogp's remote engine and a vLLM server on this machine."""

    name = "reflogp, remote engine"

    def __init__(self, model: Path, url: str) -> None:
        choice = EngineChoice("remote", url=url, check_claim=False)
        self._engine = choice.make(str(model), describe_reference(str(model)))

    def seconds(self, pairs: Pairs) -> float:
        return _drained(self._engine, pairs)


def _drained(engine: Engine, pairs: Pairs) -> float:
    """Seconds in which an engine gives all values."""
    start = time.perf_counter()
    bad = [outcome for _, outcome in engine.stream(pairs.sequences()) if isinstance(outcome, str)]
    if bad:
        raise RuntimeError(bad[0])
    return time.perf_counter() - start


class Trl:
    """TRL's DPOTrainer, its own `_precompute_ref_logps` on tokenised rows."""

    def __init__(self, model: Path, tokenizer: Any, device: str, batch: int) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        self.name, self._batch, self._device = f"TRL, batch {batch}", batch, device
        self._folder = tempfile.TemporaryDirectory()
        args = DPOConfig(
            output_dir=self._folder.name,
            max_length=None,
            bf16=False,
            use_cpu=device == "cpu",
            report_to=[],
            dataloader_pin_memory=device == "cuda",
            gradient_checkpointing=False,
        )
        row = {"prompt": "a", "chosen": "b", "rejected": "c"}
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._trainer = DPOTrainer(
            policy, copy.deepcopy(policy), args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer
        )
        reference = self._trainer.ref_model  # only this one runs: let the policy go
        self._trainer.model = self._trainer.model_wrapped = reference
        self._dataset = Dataset
        self._runs = 0

    def seconds(self, pairs: Pairs) -> float:
        columns = zip(*pairs.rows, strict=True)
        dataset = self._dataset.from_dict(
            dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), map(list, columns), strict=True))
        )
        self._runs += 1
        self._trainer._precompute_model_hash = f"{self._batch} {self._runs}"  # a name that its cache has never seen
        start = synchronized(self._device)
        self._trainer._precompute_ref_logps(dataset, "train", self._batch)
        return synchronized(self._device) - start


class Padded:
    """What one writes by hand: padded batches of 8 sequences, logits, log_softmax, gather."""

    name = "transformers, padded, batch 8"

    def __init__(self, model: Path, device: str, batch: int = 8) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
        self._device, self._batch = device, batch

    @torch.inference_mode()
    def seconds(self, pairs: Pairs) -> float:
        sequences = pairs.sequences()
        start = synchronized(self._device)
        for first in range(0, len(sequences), self._batch):
            batch = [torch.tensor([*s.prompt_ids, *s.completion_ids]) for s in sequences[first : first + self._batch]]
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(self._device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(b) for b in batch], batch_first=True).to(self._device)
            logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            logps = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None])[..., 0]
            (logps * mask[:, 1:]).sum(1).cpu()
        return synchronized(self._device) - start


class Vllm:
    """vLLM with prompt_logprobs=0 in its own environment (`make setup-vllm`), one process for all its runs."""

    name = "vLLM, prompt_logprobs=0"

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [str(VLLM_PYTHON), str(REPOSITORY / "benchmarks" / "vllm_side.py"), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if "--verbose" in sys.argv else subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    @staticmethod
    def there() -> bool:
        return VLLM_PYTHON.is_file()

    def seconds(self, pairs: Pairs) -> float:
        assert self._process.stdin is not None
        prompts = [[*map(int, s.prompt_ids), *map(int, s.completion_ids)] for s in pairs.sequences()]
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"reflogp"'):
                return json.loads(line)
        raise RuntimeError("vLLM ended; run with --verbose to see why")
