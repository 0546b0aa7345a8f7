"""The models of tools/sm90, which `make sm90` compiles for an H100."""

import pytest
import torch

from tools.sm90.models import FAMILIES, Family


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_models_have_two_layers_and_the_named_widths(family: Family):
    with torch.device("meta"):
        model = family.build()
    assert model.dtype == family.dtype
    assert model.config.num_hidden_layers == 2
    assert model.get_output_embeddings().weight.shape == (family.sizes[-1], family.sizes[0])
