"""Check that a server's weights are those of the reference.

The server's weights cannot be read. A few sequences are scored here with the local weights and on the server, and the values
are compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine import Sequence
from reflogp.scoring.torch_engine.engine import TorchEngine
from reflogp.scoring.torch_engine.selfcheck import tolerance_of
from reflogp.scoring.vllm_engine.engine import VllmEngine
from reflogp.store import Reference
from reflogp.store.checkpoint import Checkpoint

#: (prompt, completion) lengths of the sequences. Three are shorter than 512 tokens, and one is longer: with
#: speculative decoding, values of prompts of up to 512 tokens can be wrong (github.com/vllm-project/vllm/issues/53488).
_LENGTHS = ((40, 23), (40, 31), (120, 60), (560, 80))


def check_claim(
    engine: VllmEngine, model: Checkpoint, reference: Reference, device: str, trust_remote_code: bool
) -> dict[str, Any]:
    """Score a few sequences locally and on the server; return the result for the provenance.

    Args:
        engine: engine of the server.
        model: checkpoint with the reference's weights.
        reference: the reference that the server should serve.
        device: device for the local weights.
        trust_remote_code: run modelling code from the checkpoint.

    Raises:
        EngineError: the server's values differ, or the weights cannot be loaded here.
    """
    here = TorchEngine(
        model, reference.dtype, device, lm_head_dtype=reference.lm_head_dtype, trust_remote_code=trust_remote_code
    )
    sequences = [sequence for sequence in _sequences(engine.vocab_size) if not here.problems([sequence])]
    sequences = [sequence for sequence in sequences if not engine.problems([sequence])]
    ours, theirs = np.concatenate(here.score(sequences)), np.concatenate(engine.score(sequences))
    difference = float(np.sqrt(np.mean((ours - theirs) ** 2)))
    tolerance = tolerance_of(getattr(torch, reference.dtype), ours)
    if difference > tolerance:
        raise EngineError(
            f"the server does not serve {reference.name} in {reference.dtype} (reference {reference.reference_id}): "
            f"log-probs of {len(ours)} tokens differ by {difference:.3g} nats (root mean square), {tolerance:.3g} is allowed"
        )
    return {"reference": "checked", "reference_difference": difference}


def _sequences(vocab_size: int) -> list[Sequence]:
    random = np.random.default_rng(0)
    return [
        Sequence(random.integers(0, vocab_size, prompt), random.integers(0, vocab_size, completion))
        for prompt, completion in _LENGTHS
    ]
