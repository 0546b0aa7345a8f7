"""Define the protocols of engines, and a description of an engine that can be sent to another process.

An engine's libraries are imported only when the engine is loaded.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from reflogp.scoring.torch_engine import Outcome, Sequence
from reflogp.scoring.torch_engine.sequences import Operations
from reflogp.store import ContentMismatchError, FileChangedError, Reference, UsageError
from reflogp.store.checkpoint import Checkpoint
from reflogp.store.reference import OpenModel, autocast_dtype, open_model

#: Number of attempts to load a model while the timestamps of its files change. After the last attempt, FileChangedError is
#: raised.
_LOAD_ATTEMPTS = 2

EngineName = Literal["torch", "vllm", "remote"]


class Engine(Protocol):
    """An engine, which scores the sequences of a dataset."""

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """Return the sequences that this engine cannot score, as index -> reason."""

    def flow(self, groups: Iterable[list[Sequence]]) -> Generator[list[tuple[int, Outcome]]]:
        """Score groups as they arrive, and yield (number, outcome) of the sequences of each pass.

        Numbers start at 0 and count the sequences of all groups.

        An empty group means that no group is available now. The engine then finishes the passes that it has begun. If there is
        no such pass, it yields an empty list.
        """

    def provenance(self) -> dict[str, Any]:
        """Return a description of how this engine computes values. The store keeps it with the values."""

    def operations(self) -> Operations:
        """Return the operations of all sequences scored so far. Both counts are 0 if this engine cannot count operations."""

    def peak_flops_per_second(self) -> float | None:
        """Return the device's rate of matrix products, or None if this engine cannot measure the rate."""

    def close(self) -> None:
        """End the engine's processes and connections, and release the model. The engine cannot score afterwards."""


class PassEngine(Engine, Protocol):
    """An engine that can switch between callers after each pass. The workers of a service need such an engine.

    Attributes:
        token_budget: approximate number of tokens up to which it saves time to merge requests into one pass.
        pass_seconds: maximum device time of a pass in seconds, or None for no limit.
    """

    token_budget: int
    pass_seconds: float | None

    def passes(
        self,
        sequences: list[Sequence],
        skip: Collection[int] = (),
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Iterator[list[tuple[int, Outcome]]]:
        """Yield (index, outcome) of the sequences of each pass, without those in `skip`.

        Call `before` with the indices of each pass.
        """

    def flow(
        self,
        groups: Iterable[list[Sequence]],
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Generator[list[tuple[int, Outcome]]]:
        """Score groups as they arrive; see Engine.flow. Before each pass, `before` is called with the numbers of its sequences.

        The caller may use the engine for other work between two yields.
        """


@dataclass(frozen=True)
class EngineChoice:
    """The name and settings of an engine. All fields are plain values, so the object can be sent to workers as JSON.

    Attributes:
        name: "torch" for torch in this process, "vllm" for vLLM in a process with its own environment, or "remote" for a
            running `vllm serve`.
        device: torch: "auto", "cpu", "cuda", "cuda:1", … remote: the device on which `check_claim` loads the local weights.
        token_budget: torch: maximum number of tokens of a pass, or "auto".
        trust_remote_code: True runs modelling code from the checkpoint.
        vllm_python: vllm: Python interpreter of vLLM's environment. None uses $REFLOGP_VLLM_PYTHON, or else this process's
            interpreter.
        tensor_parallel: vllm: number of GPUs that one model is spread over.
        vllm_options: vllm: further arguments of vLLM, whose names are in vllm_engine.options.ALLOWED.
        url: remote: URL of a running `vllm serve`. The API key is read from $VLLM_API_KEY.
        served_model: remote: the server's name for the model; None if the server has only one model.
        concurrency: remote: maximum number of requests at the same time.
        patience_seconds: remote: maximum seconds to wait while the server is unreachable or busy.
        check_claim: remote: True compares the server's values with values of the local weights before scoring.

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

    def gpus(self) -> int:
        """Return the number of GPUs of one engine: 0 on the CPU or for a remote engine. The device "auto" counts as a GPU."""
        if self.device == "cpu" or self.name == "remote":
            return 0
        return self.tensor_parallel if self.name == "vllm" else 1

    def default_dtype(self) -> str:
        """Return the dtype for a model without stored values: "float32" if this engine has no GPU, else "bfloat16".

        A CPU without bfloat16 instructions is slower in bfloat16, and small models on CPUs are trained in float32. vLLM and the
        server of a remote engine are assumed to have a GPU.
        """
        import torch

        if self.name != "torch":
            return "bfloat16"
        on_cpu = self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available())
        return "float32" if on_cpu else "bfloat16"

    def require_dtype(self, dtype: str) -> None:
        """Raise UsageError if this engine cannot compute in `dtype`."""
        if self.name != "torch" and autocast_dtype(dtype) is not None:
            raise UsageError(
                f"{dtype} means float32 weights under torch.autocast, which the {self.name} engine cannot compute: "
                "use the torch engine"
            )

    def require_loadable(self, model: str, reference: Reference) -> None:
        """Raise the errors of `make` that can be found without reading weights.

        Raises:
            ContentMismatchError: the folder holds another model than the reference.
            OutOfMemoryError: the memory of the torch engine's device is too small for the model, even if nothing else uses it.
            EngineError: the torch engine cannot use its device, or transformers does not know the model.
        """
        with open_reference_files(model, reference) as opened:
            if self.name == "torch":
                from reflogp.scoring.torch_engine.load import require_device

                with opened.for_loading() as checkpoint:
                    require_device(checkpoint, reference.dtype, self.device, self.trust_remote_code)

    def make(self, model: str, reference: Reference) -> PassEngine:
        """Load the engine with exactly the files of the reference, and return the engine.

        At each load, the files are opened and hashed (digests of unchanged files are cached), and they are read through the
        open file handles. When the model is in memory, the files are checked for changes.

        Args:
            model: local folder of the model.
            reference: the reference whose values are computed.

        Raises:
            ContentMismatchError: the folder holds another model than the reference.
            FileChangedError: a file changed during the load.
            UsageError, CheckpointError, EngineError: the engine cannot be loaded.
        """
        self.require_dtype(reference.dtype)
        for attempt in range(_LOAD_ATTEMPTS):
            try:
                return self._made(model, reference)
            except FileChangedError as error:  # new permissions or hard links also change a file's timestamps
                if isinstance(error, ContentMismatchError) or attempt == _LOAD_ATTEMPTS - 1:
                    raise
                gc.collect()
        raise AssertionError("unreachable")

    def _made(self, model: str, reference: Reference) -> PassEngine:
        match self.name:
            case "torch":
                with open_reference_files(model, reference) as opened, opened.for_loading() as checkpoint:
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
            )

        return run_in_own_thread(make) if choose_device(self.device).type == "cpu" else make()

    def _vllm(self, model: str, reference: Reference) -> PassEngine:
        from reflogp.scoring.vllm_engine.child import VllmProcess
        from reflogp.scoring.vllm_engine.engine import VllmEngine
        from reflogp.scoring.vllm_engine.options import vllm_options

        @contextmanager
        def unchanged() -> Iterator[None]:
            """Check before and after the block that the paths lead to the open files. vLLM's processes open the paths."""
            with open_reference_files(model, reference) as opened:
                opened.files.check(by_path=True)
                try:
                    yield
                finally:  # a changed file may have caused an error in the block: FileChangedError replaces it
                    opened.files.check(by_path=True)

        python = self.vllm_python or os.environ.get("REFLOGP_VLLM_PYTHON") or sys.executable
        with unchanged():
            loading = vllm_options(model, reference, self.tensor_parallel, self.trust_remote_code, self.vllm_options)
            process = VllmProcess(python, loading, unchanged)
        return VllmEngine(process, reference)

    def _remote(self, model: str, reference: Reference) -> PassEngine:
        from reflogp.scoring.vllm_engine.engine import VllmEngine
        from reflogp.scoring.vllm_engine.server import ServerPlace, VllmServer, check_claim

        if self.url is None:
            raise UsageError("the remote engine needs the URL of a running `vllm serve`: give --url")
        place = ServerPlace(
            self.url, self.served_model, os.environ.get("VLLM_API_KEY"), self.concurrency, self.patience_seconds
        )
        engine = VllmEngine(VllmServer(place), reference)
        engine.claim = {"reference": "claimed"}
        if self.check_claim:
            with open_reference_files(model, reference) as opened, opened.for_loading() as checkpoint:
                engine.claim = check_claim(engine, checkpoint, reference, self.device, self.trust_remote_code)
        return engine


@contextmanager
def open_reference_files(model: str, reference: Reference) -> Iterator[OpenModel]:
    """Open a model's files for the block; see `open_model`.

    Raises ContentMismatchError if they are not the reference's files.
    """
    with open_model(model, reference.dtype, lm_head_dtype=reference.lm_head_dtype) as opened:
        opened.require(reference)
        yield opened
