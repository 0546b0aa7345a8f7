"""tools/sm90: its models, and a run in the environment of `make sm90`, where there is one."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import torch

from tests.conftest import REPOSITORY
from tools.sm90.models import FAMILIES, Family

ENVIRONMENT = REPOSITORY / ".venv-sm90"
PARTS = ("store", "scoring", "service", "client", "cli", "trainer_ext")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_models_have_two_layers_and_the_named_widths(family: Family):
    with torch.device("meta"):
        model = family.build()
    assert model.dtype == family.dtype
    assert model.config.num_hidden_layers == 2
    assert model.get_output_embeddings().weight.shape == (family.sizes[-1], family.sizes[0])


@pytest.mark.slow
@pytest.mark.skipif(not (ENVIRONMENT / "stamp").exists(), reason="needs the environment of make sm90")
def test_a_page_about_one_model(tmp_path):
    environment = {
        **os.environ,
        "LD_PRELOAD": str(ENVIRONMENT / "no_driver.so"),
        "PYTHONPATH": os.pathsep.join(PARTS),
    }
    command = [ENVIRONMENT / "bin" / "python", "-m", "tools.sm90", "--family", "Qwen2 0.5B", "--out", tmp_path / "page.md"]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    page = (tmp_path / "page.md").read_text()
    [row] = re.findall(r"\| Qwen2 0\.5B, bfloat16 \|.*", page)
    assert "torch_varlen" in row
    assert re.search(r"graphs.*\n.*\n.*layers [1-9]", page)
    assert page.count("| compiled |") >= 8
