"""Define the protocols that engines implement, and EngineChoice, which describes an engine and can be sent to other processes.

An engine's libraries are imported only when the engine is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from reflogp.scoring.torch_engine import Outcome, Sequence
from reflogp.scoring.torch_engine.sequences import TokenCounts
from reflogp.store import Reference, UsageError
from reflogp.store.checkpoint import Checkpoint
from reflogp.store.reference import ReferenceFiles, autocast_dtype, read_reference_files

EngineName = Literal["torch", "vllm", "remote"]


class Engine(Protocol):
    def problems(self, sequences: list[Sequence]) -> dict[int, str]: ...

    def flow(self, groups: Iterable[list[Sequence]]) -> Generator[list[tuple[int, Outcome]]]:
        """Score groups of sequences as they arrive.

        After each pass, yield a list of (number, outcome) for the sequences in the pass. Sequences are numbered from 0 across
        all groups.

        An empty group means that the next group is not available yet. The engine then finishes the passes that it has started;
        if it has started none, it yields an empty list.
        """

    def provenance(self) -> dict[str, Any]:
        """Return a description of how this engine computes values. The description is stored with the values."""

    def token_counts(self) -> TokenCounts: ...

    def close(self) -> None:
        """Stop the engine's processes, close its connections and release the model. The engine cannot score afterwards."""


class PassEngine(Engine, Protocol):
    """An engine that can score other sequences while a call to `passes` or `flow` is suspended between two passes.

    The service's workers use such engines to score online requests between two passes of a job.

    Attributes:
        token_budget: maximum number of tokens in a pass. A pass with a single sequence may have more. The service's workers
            combine online requests up to this number of tokens.
        pass_seconds: maximum device time of a pass in seconds, or None for no limit. It has no effect with vLLM.
    """

    token_budget: int
    pass_seconds: float | None

    def passes(
        self,
        sequences: list[Sequence],
        skip: Collection[int] = (),
        temperature: float = 1.0,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        """Score sequences, except those whose index is in `skip`.

        The logits are divided by `temperature`. An engine that supports only temperature 1 raises EngineError for all others.

        After each pass, yield a list with the index and the outcome of each sequence in the pass.
        """

    def flow(self, groups: Iterable[list[Sequence]], temperature: float = 1.0) -> Generator[list[tuple[int, Outcome]]]:
        """Score groups as they arrive; see Engine.flow. `temperature` has the same meaning as in `passes`.

        Between two yields, the caller may score other sequences with the engine.
        """


@dataclass(frozen=True)
class EngineChoice:
    """The name and settings of an engine. All fields are plain values, so the object can be sent to workers as JSON.

    Attributes:
        name: "torch" for torch in this process, "vllm" for vLLM in a process with its own environment, or "remote" for a
            running `vllm serve`.
        device: for torch, "auto", "cpu", "cuda", "cuda:1", …; for remote, the device on which the local weights are loaded if
            `check_claim` is True.
        token_budget: for torch, the maximum number of tokens in a pass; "auto" computes it from the free memory.
        trust_remote_code: whether to run modeling code from the checkpoint.
        vllm_python: for vllm, the Python interpreter of vLLM's environment. If None, it is $REFLOGP_VLLM_PYTHON, or this
            process's interpreter if that variable is not set.
        tensor_parallel: for vllm, the number of GPUs across which each layer is split. One engine uses this number of GPUs
            times the `pipeline_parallel_size` in `vllm_options`, which is 1 by default.
        vllm_options: for vllm, additional arguments for vLLM; vllm_engine.options.ALLOWED lists the names that are allowed.
        url: for remote, the URL of a running `vllm serve`. The API key is read from $VLLM_API_KEY.
        served_model: for remote, the name under which the server serves the model; None if the server has only one model.
        concurrency: for remote, the maximum number of simultaneous requests.
        patience_seconds: for remote, the maximum number of seconds to wait while the server is unreachable or busy.
        check_claim: for remote, whether to check before scoring that the server serves the reference model. A few of the
            server's log-probs are compared with log-probs computed with the local weights. If they differ too much, EngineError
            is raised.
        top_k: number of most probable tokens to compute at each completion position, at most 256; see TopLogps.

    Examples:
        >>> from reflogp.scoring import EngineChoice, score
        >>> engine = EngineChoice(device="cpu", token_budget=4096)
        >>> score("./sft-model", "pairs.jsonl", "./logps", engine=engine).scored  # the store has all values
        0
    """

    name: EngineName = "torch"
    device: str = "auto"
    token_budget: int | Literal["auto"] = "auto"
    trust_remote_code: bool = False
    vllm_python: str | None = None
    tensor_parallel: int = 1
    vllm_options: dict[str, Any] = field(default_factory=dict)
    url: str | None = None
    served_model: str | None = None
    concurrency: int = 64
    patience_seconds: float = 300.0
    check_claim: bool = True
    top_k: int = 0

    def gpus(self) -> int:
        """Return the number of GPUs that one engine uses: 0 on a CPU or for a remote engine.

        For the device "auto", a GPU is assumed.
        """
        if self.device == "cpu" or self.name == "remote":
            return 0
        return self.tensor_parallel * self.vllm_options.get("pipeline_parallel_size", 1) if self.name == "vllm" else 1

    def default_dtype(self) -> str:
        """Return what dtype="auto" means if the store has no log-probs of the model: "float32" on a CPU, else "bfloat16".

        On a CPU, the default is float32, for two reasons: a CPU without bfloat16 instructions is slower in bfloat16, and small
        models are usually trained in float32 on a CPU. vLLM and the server of a remote engine are assumed to have a GPU.
        """
        if self.name != "torch" or self.device not in ("auto", "cpu"):
            return "bfloat16"
        if self.device == "cpu":
            return "float32"
        import torch

        return "bfloat16" if torch.cuda.is_available() else "float32"

    def require_dtype(self, dtype: str) -> None:
        if self.name != "torch" and autocast_dtype(dtype) is not None:
            raise UsageError(
                f"{dtype} means float32 weights under torch.autocast, which the {self.name} engine does not support; "
                "use the torch engine"
            )

    def require_loadable(self, model: str, reference: Reference) -> None:
        """Check some of the requirements of `make`, without loading the weights.

        Raises:
            ContentMismatchError: the model in the folder is not the reference model.
            OutOfMemoryError: the torch engine's device has too little memory for the model, even if nothing else uses the
                device.
            EngineError: the torch engine cannot use its device, or transformers does not support the model.
        """
        files = reference_files(model, reference)
        if self.name == "torch":
            from reflogp.scoring.torch_engine.load import require_device

            with files.unchanged() as checkpoint:
                require_device(checkpoint, reference.dtype, self.device, self.trust_remote_code)

    def make(self, model: str, reference: Reference) -> PassEngine:
        """Load a reference's model, and return the engine that computes values with it.

        The model's files are hashed first (digests of unchanged files are cached). Once the model is in memory, the files are
        checked for changes. For a remote engine, the model's files are read only if `check_claim` is True.

        Raises:
            ContentMismatchError: the model in the folder is not the reference model.
            FileChangedError: a file or its timestamps changed while the model was being loaded.
            UsageError, CheckpointError, EngineError: the engine cannot be loaded.
        """
        self.require_dtype(reference.dtype)
        match self.name:
            case "torch":
                with reference_files(model, reference).unchanged() as checkpoint:
                    return self._torch(checkpoint, reference)
            case "vllm":
                return self._vllm(model, reference)
            case "remote":
                return self._remote(model, reference)

    def _torch(self, model: Checkpoint, reference: Reference) -> PassEngine:
        from reflogp.scoring.torch_engine import TorchEngine
        from reflogp.scoring.torch_engine.device import run_in_own_thread
        from reflogp.scoring.torch_engine.load import choose_device

        def make() -> PassEngine:
            return TorchEngine(
                model,
                reference.dtype,
                self.device,
                self.token_budget,
                lm_head_dtype=reference.lm_head_dtype,
                trust_remote_code=self.trust_remote_code,
                top_k=self.top_k,
            )

        return run_in_own_thread(make) if choose_device(self.device).type == "cpu" else make()

    def _vllm(self, model: str, reference: Reference) -> PassEngine:
        from reflogp.scoring.vllm_engine.child import VllmProcess
        from reflogp.scoring.vllm_engine.engine import VllmEngine
        from reflogp.scoring.vllm_engine.options import vllm_options

        def unchanged() -> AbstractContextManager[Any]:
            return reference_files(model, reference).unchanged()

        python = self.vllm_python or os.environ.get("REFLOGP_VLLM_PYTHON") or sys.executable
        with unchanged():
            loading = vllm_options(
                model, reference, self.tensor_parallel, self.trust_remote_code, self.vllm_options, self.top_k
            )
            process = VllmProcess(python, loading, unchanged)
        return VllmEngine(process, reference, self.top_k)

    def _remote(self, model: str, reference: Reference) -> PassEngine:
        from reflogp.scoring.vllm_engine.engine import VllmEngine
        from reflogp.scoring.vllm_engine.server import VllmServer, check_claim

        if self.url is None:
            raise UsageError("the remote engine needs the URL of a running `vllm serve`; pass --url, or EngineChoice(url=…)")
        key = os.environ.get("VLLM_API_KEY")
        server = VllmServer(self.url, self.served_model, key, self.concurrency, self.patience_seconds, self.top_k)
        engine = VllmEngine(server, reference, self.top_k)
        engine.claim = {"reference": "claimed"}
        if self.check_claim:
            with reference_files(model, reference).unchanged() as checkpoint:
                engine.claim = check_claim(engine, checkpoint, reference, self.device, self.trust_remote_code)
        return engine


def reference_files(model: str, reference: Reference) -> ReferenceFiles:
    """Read a model's files; see `read_reference_files`. Raises ContentMismatchError if they are not the reference's files."""
    files = read_reference_files(model, reference.dtype, lm_head_dtype=reference.lm_head_dtype)
    files.require(reference)
    return files
