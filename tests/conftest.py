"""Small real parts for every test: data, tokenizers trained on it, models with random weights. Nothing is fetched."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TQDM_DISABLE"] = "1"

REPOSITORY = Path(__file__).resolve().parent.parent
PAIRS = REPOSITORY / "examples" / "data" / "gsm8k_pairs.jsonl"
#: The command line for a process that a test interrupts. A shell starts background processes with SIGINT ignored, and their
#: children inherit that.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from reflogp.cli import main; main()"

#: The files that take longest, longest first, so that none of them is begun when the others are done.
LONGEST = (
    "benchmarks/test_tiny_runs",
    "trainer_ext/test_launchers",
    "scoring/test_ray",
    "trainer_ext/test_swift",
    "service/test_lending",
    "scoring/test_sweep",
    "trainer_ext/test_axolotl",
    "trainer_ext/test_ordinary_runs",
    "trainer_ext/test_unsloth",
    "service/test_jobs",
    "trainer_ext/test_openrlhf",
    "trainer_ext/test_llamafactory",
    "trainer_ext/test_distributed",
    "service/test_state_machine",
    "service/test_staying_up",
    "trainer_ext/test_online",
    "service/test_pages",
    "benchmarks/test_gpu_first",
    "benchmarks/test_gpu",
    "examples/test_examples",
    "docs/test_blocks",
    "docs/test_api_reference",
    "service/test_online_scores",
    "service/test_reader",
    "store/test_stress",
    "scoring/test_loading",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    place = {f"tests/{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep digests and dataset caches of a test run out of the user's own."""
    folder = tmp_path_factory.mktemp("caches")
    os.environ["REFLOGP_CACHE_DIR"] = str(folder / "reflogp")
    if importlib.util.find_spec("datasets") is not None:  # a machine for tests/gpu may lack it
        import datasets

        datasets.config.HF_DATASETS_CACHE = str(folder / "datasets")


@pytest.fixture(scope="session")
def warm_python():
    """A WarmPython, for tests that start services and workers again and again."""
    from tests.service.warm_python import WarmPython

    python = WarmPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def pair_rows() -> list[dict]:
    """The shipped preference pairs, as dictionaries."""
    return [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def tokenizer(pair_rows):
    from reflogp.cli.demo_model import train_tokenizer

    return train_tokenizer([m["content"] for row in pair_rows for side in row.values() for m in side], vocab_size=1024)


@pytest.fixture(scope="session")
def reference_folder(tokenizer, tmp_path_factory) -> Path:
    """A Llama of about 0.4M parameters with random weights, and its tokenizer."""
    size = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6}
    return save_llama(tmp_path_factory.mktemp("reference"), tokenizer, **size)


@pytest.fixture
def pairs_file(tmp_path, pair_rows) -> Path:
    """The first 40 pairs as JSON Lines."""
    return write_rows(tmp_path / "pairs.jsonl", pair_rows[:40])


@pytest.fixture
def reflogp(monkeypatch, capsys):
    """reflogp(*arguments) -> (exit code, stdout, stderr) of the command line."""
    from reflogp.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["reflogp", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return int(caught.value.code or 0), captured.out, captured.err

    return run


def last_object(stdout: str) -> dict:
    """What a command with --json says."""
    return json.loads(stdout.strip().splitlines()[-1])


def pytest_terminal_summary(terminalreporter) -> None:
    """Show what tests recorded as `told`; pytest-xdist brings it here from its processes."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "told":
                terminalreporter.write_line(value)


def save_llama(folder: Path, tokenizer, **size: int) -> Path:
    """A Llama of this size with random weights, and its tokenizer, as a checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.08,  # wide enough that log-probs are far from uniform
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **size,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def wider_data() -> list[Path]:
    """The larger data files that $REFLOGP_TEST_DATA names, beside the shipped one."""
    folder = os.environ.get("REFLOGP_TEST_DATA")
    files = sorted(Path(folder).glob("*.jsonl.gz")) if folder else []
    assert files or not folder, f"REFLOGP_TEST_DATA={folder} holds no *.jsonl.gz"
    return [PAIRS, *files]


def plain_token_logps(model, prompt_ids, completion_ids, temperature=1.0):
    """log p of each completion token by one unpadded float32 forward, written without any of reflogp's code."""
    import torch

    ids = torch.tensor([*map(int, prompt_ids), *map(int, completion_ids)])
    with torch.no_grad():
        distribution = torch.log_softmax(model(ids[None]).logits[0].double() / temperature, dim=-1)
    return [float(distribution[len(prompt_ids) - 1 + t, int(token)]) for t, token in enumerate(completion_ids)]


def largest_error(values, model, sequences, temperature=1.0) -> float:
    """The largest difference between values of sequences, by whatever, and those of plain forwards; NaN if a value is NaN."""
    import numpy as np

    plain = [plain_token_logps(model, each.prompt_ids, each.completion_ids, temperature) for each in sequences]
    assert [len(some) for some in values] == [len(some) for some in plain]
    return float(np.abs(np.concatenate(values) - np.concatenate(plain)).max())
