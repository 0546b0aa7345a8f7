"""Every code block of the docs runs, or is parsed where a test machine cannot run it, with the reason said here."""

from __future__ import annotations

import pytest

from tests.docs.blocks import Block, blocks_of, pages
from tests.docs.workspace import Workspace, lines_of, parse, parse_ini, parse_python, parse_yaml

#: (page, beginning of a line of a sh block or of a block in another language) -> why it is parsed and not run. Page None: any.
NOT_RUN: dict[tuple[str | None, str], str] = {
    (None, "make "): "sets up environments, or runs this very test; `make --dry-run` reads it",
    (None, "pip install"): "asks a package index; the requirement is read, and its extras are looked up",
    (None, "reflogp score ./sft-70b"): "70B parameters, 8 GPUs or a server; tests/vllm score with small models",
    (None, "docker "): "needs a Docker engine; make test-docker runs one",
    ("docs/docker.md", "export REFLOGP_"): "for a container",
    ("docs/security.md", "umask"): "would stay in force for the tests after it",
    ("docs/operations.md", "export OTEL_"): "no collector runs there; tests/cli/test_traces.py and tests/service run one",
    ("docs/docker.md", "reflogp submit"): "asks a service in a container",
    (None, "deepspeed "): "OpenRLHF's environment; tests/trainer_ext/test_openrlhf.py trains there",
    (None, "llamafactory-cli"): "LLaMA-Factory's environment",
    (None, "swift rlhf"): "ms-swift's environment",
    (None, "python -m reflogp.trainer"): "a framework's environment; tests/trainer_ext train there",
    ("docs/teachers.md", "lm_eval "): "lm-eval's environment; tests/service/test_completions.py reads answers as it does",
    ("docs/axolotl.md", "axolotl "): "axolotl's environment; tests/trainer_ext/test_axolotl.py trains there",
    ("docs/unsloth.md", "import unsloth"): "unsloth's environment; tests/trainer_ext/test_unsloth.py trains there",
    ("docs/clusters.md", "kubectl "): "needs a cluster; tests/examples/test_clusters.py validates the file",
    ("docs/clusters.md", "sbatch "): "needs Slurm; tests/examples/test_clusters.py runs both scripts",
    ("docs/clusters.md", "sky "): "needs a cloud; tests/examples/test_skypilot.py runs what it can",
    ("docs/clusters.md", "ssh "): "needs the machine of `sky launch`",
    ("docs/service.md", "reflogp submit http://127.0.0.1:8311 team/prefs"): "the Hub; tests/service/test_fetch.py does",
    ("docs/engines.md", "python -m venv"): "makes vLLM's environment; make setup-vllm does",
    ("docs/engines.md", "/opt/vllm/bin/pip"): "makes vLLM's environment; make setup-vllm does",
    ("docs/engines.md", "export REFLOGP_VLLM_PYTHON"): "names vLLM's environment",
    ("docs/engines.md", "reflogp reference /models/sft-70b"): "70B parameters on another machine",
    ("docs/engines.md", "reflogp score ./tokenizer"): "a server of such a model; tests/vllm/test_remote.py claims a small one",
    ("docs/many-gpus.md", "reflogp score ./sft-model pairs.jsonl --store ./logps --devices cuda:0"): "needs GPUs",
    ("docs/ray.md", "reflogp score --ray"): "8 GPUs, or a cluster; tests/scoring/test_ray.py scores on two nodes",
    ("docs/ray.md", "ray start"): "starts a cluster; tests/scoring/test_ray.py does",
    (None, "reflogp store push"): "the Hugging Face Hub; tests/store/test_hub.py pushes to a server of its API",
    (None, "reflogp store pull"): "the Hugging Face Hub; tests/store/test_hub.py pulls from a server of its API",
    ("docs/operations.md", "[Service]"): "systemd starts it",
    ("CONTRIBUTING.md", "PYTHONPATH=store"): "needs a GPU; tests/benchmarks/test_gpu.py collects them without one",
    ("CONTRIBUTING.md", "python benchmarks/gpu.py"): "needs a GPU; tests/benchmarks/test_gpu.py runs it on a CPU",
}


def _reason(page: str, text: str) -> str | None:
    """Why a line or a block is not run; None where it is."""
    for (where, beginning), reason in NOT_RUN.items():
        if where in (None, page) and text.lstrip().startswith(beginning):
            return reason
    return None


def _handle(block: Block, workspace: Workspace) -> None:
    """Run a block, or parse it."""
    match block.language:
        case "sh":
            for line in lines_of(block):
                parse(line) if _reason(block.page, line) else workspace.run_line(line)
        case "python" if _reason(block.page, block.text):
            parse_python(block)
        case "python":
            workspace.run_python(block)
        case "toml":
            workspace.run_toml(block)
        case "json":
            workspace.run_json(block)
        case "yaml":
            parse_yaml(block)
        case "ini" if _reason(block.page, block.text):
            parse_ini(block)
        case "text":  # trees and drawings in letters: no code
            pass
        case _:
            raise AssertionError(f"{block}: a block of {block.language or 'no language'}, which nothing here runs")


@pytest.mark.slow
@pytest.mark.parametrize("page", pages())
def test_every_block_of_the_page_runs(page, workspace, monkeypatch):
    monkeypatch.setattr("warnings.showwarning", lambda *_, **__: None)
    blocks = blocks_of(page)
    workspace.begin_page(blocks)
    for block in blocks:
        try:
            _handle(block, workspace)
        except BaseException as error:
            error.add_note(f"in the {block.language} block at {block}")
            raise


def test_what_is_not_run_is_on_its_page():
    texts = {page: [text for block in blocks_of(page) for text in [block.text, *block.text.splitlines()]] for page in pages()}
    for page, beginning in NOT_RUN:
        found = texts[page] if page else [text for some in texts.values() for text in some]
        assert any(text.lstrip().startswith(beginning) for text in found), (page, beginning)
