"""Define the sides that scoring.py compares: reflogp's engines, TRL's own precomputation, a plain padded transformers loop.

Every side gets the same model folder, scores pairs, and returns the seconds that it took.
"""

from __future__ import annotations

import copy
import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from flops import Qwen2Flops
from pairs import Pairs
from shapes import random_model
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_process import VLLM_PYTHON

from reflogp.cli.demo_model import train_tokenizer
from reflogp.scoring.data.encode import tokenize_rows
from reflogp.scoring.engines import Engine, EngineChoice
from reflogp.scoring.machine import quiet_libraries
from reflogp.scoring.torch_engine import TorchEngine
from reflogp.scoring.torch_engine.packing import packs
from reflogp.store import describe_reference

VOCABULARY = 32_000


def read_pairs(file: Path, count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows of a JSON Lines file, gzipped or not."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in text.splitlines()[:count]]


def tokenize(name: str, rows: list[dict[str, Any]], tokenizer: Any) -> Pairs:
    found = tokenize_rows(rows, "preference", tokenizer)
    return Pairs(name, [(p, c, r) for [(p, (c, r))] in found if len(c) and len(r)])


def make_tokenizer(rows: list[dict[str, Any]], vocab_size: int = VOCABULARY) -> Any:
    """Train a tokenizer on the benchmark's own texts."""
    sides = (row[name] for row in rows for name in ("prompt", "chosen", "rejected"))
    texts = [m["content"] for side in sides for m in (side if isinstance(side, list) else [{"content": side}])]
    return train_tokenizer(texts, vocab_size)


def make_model(folder: Path, shape: str, vocab_size: int = VOCABULARY) -> int:
    """Write the checkpoint of a Qwen2 of this shape, random weights in bfloat16; return its number of parameters."""
    model = random_model(shape, vocab_size, "cpu")
    model.save_pretrained(folder)
    return int(model.num_parameters())


def synchronized(device: str) -> float:
    """Wait until the device has finished; return the current time."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def quiet() -> None:
    """Turn off progress bars and notices."""
    import os

    from datasets import disable_progress_bars

    os.environ["TQDM_DISABLE"] = "1"
    disable_progress_bars()
    quiet_libraries()


class Ours:
    """reflogp's engine, loaded (and compiled) before the clock starts."""

    name = "reflogp"

    def __init__(self, model: Path, device: str, top_k: int = 0) -> None:
        self.engine = TorchEngine(str(model), "bfloat16", device, top_k=top_k)
        self._device = device
        self._flops = Qwen2Flops(AutoConfig.from_pretrained(model))

    def seconds(self, pairs: Pairs) -> float:
        start = synchronized(self._device)
        self.engine.score(pairs.sequences())
        return synchronized(self._device) - start

    def operations(self, pairs: Pairs) -> float:
        """Return the number of operations with which the pairs are scored; shared tokens count once."""
        return sum(self._flops.of_pack(pack) for pack in packs(pairs.sequences(), self.engine.token_budget))


class OursWithVllm:
    """reflogp's vLLM engine in its own environment, with the prefix cache enabled."""

    name = "reflogp, vllm engine"

    def __init__(self, model: Path) -> None:
        choice = EngineChoice("vllm", vllm_python=str(VLLM_PYTHON))
        self._engine = choice.make(str(model), describe_reference(str(model)))

    def seconds(self, pairs: Pairs) -> float:
        return _drained(self._engine, pairs)

    def close(self) -> None:
        self._engine.close()


class OursWithServer:
    """reflogp's remote engine and a vLLM server on this machine."""

    name = "reflogp, remote engine"

    def __init__(self, model: Path, url: str) -> None:
        choice = EngineChoice("remote", url=url, check_claim=False)
        self._engine = choice.make(str(model), describe_reference(str(model)))

    def seconds(self, pairs: Pairs) -> float:
        return _drained(self._engine, pairs)

    def close(self) -> None:
        self._engine.close()


def _drained(engine: Engine, pairs: Pairs) -> float:
    """Return the seconds in which an engine computes all values."""
    start = time.perf_counter()
    bad = [outcome for _, outcome in engine.stream(pairs.sequences()) if isinstance(outcome, str)]
    if bad:
        raise RuntimeError(bad[0])
    return time.perf_counter() - start


class Trl:
    """TRL's DPOTrainer: its own `_precompute_ref_logps`, called on tokenized rows."""

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
        reference = self._trainer.ref_model  # only the reference runs: free the policy
        self._trainer.model = self._trainer.model_wrapped = reference
        self._dataset = Dataset
        self._runs = 0

    def seconds(self, pairs: Pairs) -> float:
        columns = zip(*pairs.rows, strict=True)
        dataset = self._dataset.from_dict(
            dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), map(list, columns), strict=True))
        )
        self._runs += 1
        self._trainer._precompute_model_hash = f"{self._batch} {self._runs}"  # a name that TRL's cache does not contain
        start = synchronized(self._device)
        self._trainer._precompute_ref_logps(dataset, "train", self._batch)
        return synchronized(self._device) - start


class Padded:
    """A hand-written loop: padded batches, by default of 8 sequences, logits, log_softmax, gather; and topk if asked for."""

    name = "transformers, padded, batch 8"

    def __init__(self, model: Path, device: str, batch: int = 8, top_k: int = 0) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
        self._device, self._batch, self._top_k = device, batch, top_k

    @torch.inference_mode()
    def seconds(self, pairs: Pairs) -> float:
        sequences = pairs.sequences()
        start = synchronized(self._device)
        for first in range(0, len(sequences), self._batch):
            batch = [torch.tensor([*s.prompt_ids, *s.completion_ids]) for s in sequences[first : first + self._batch]]
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(self._device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(b) for b in batch], batch_first=True).to(self._device)
            logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            logps = torch.log_softmax(logits.float(), -1)
            (logps.gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]).sum(1).cpu()
            if self._top_k:
                best = torch.topk(logps, self._top_k)
                best.values.cpu(), best.indices.cpu()
        return synchronized(self._device) - start
