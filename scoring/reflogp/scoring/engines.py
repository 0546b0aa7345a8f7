"""What scoring needs of an engine, and the choice of one as data: made on the command line or by a service, loaded elsewhere.

Knows each engine's name and settings. Loads an engine's own libraries only when that engine is made.
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
from reflogp.scoring.torch_engine.operations import Operations
from reflogp.store import FileChangedError, OtherContentError, Reference, UsageError
from reflogp.store.checkpoint import Checkpoint
from reflogp.store.reference import OpenModel, autocast_dtype, open_model

#: Loads of one model, when its files' times change while they are read, before that is an error.
_LOAD_ATTEMPTS = 2

EngineName = Literal["torch", "vllm", "remote"]


class Engine(Protocol):
    """What scoring a dataset needs of an engine."""

    def problems(self, sequences: list[Sequence]) -> dict[int, str]:
        """Index -> why this engine cannot score that sequence."""

    def flow(self, groups: Iterable[list[Sequence]]) -> Generator[list[tuple[int, Outcome]]]:
        """(number, outcome) of a pass's sequences, numbered from 0 through all groups, for as long as groups come.

        An empty group says that there is none at the moment. Then what is under way ends, and an empty list is the item.
        """

    def provenance(self) -> dict[str, Any]:
        """How this engine makes values; stored beside them."""

    def operations(self) -> Operations:
        """Operations of everything scored so far; both counts stay 0 where this engine cannot count them."""

    def peak_flops_per_second(self) -> float | None:
        """Matrix product rate of the device, or None where this engine cannot measure it."""

    def close(self) -> None:
        """End what the engine started and let go of the model. No values are asked of it afterwards."""


class PassEngine(Engine, Protocol):
    """An engine that takes turns: what a service's worker needs.

    Attributes:
        token_budget: about how many tokens of several requests are worth merging.
        pass_seconds: device time of a pass at most, or None for as long as pays.
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
        """(index, outcome) of all but the skipped ones; `before` is told each pass's indices."""

    def flow(
        self,
        groups: Iterable[list[Sequence]],
        temperature: float = 1.0,
        before: Callable[[list[int]], None] | None = None,
    ) -> Generator[list[tuple[int, Outcome]]]:
        """As Engine.flow: the caller may do something else between two passes; `before` is told each one's numbers."""


@dataclass(frozen=True)
class EngineChoice:
    """An engine that is not loaded yet. Of plain values only: it travels to workers as JSON.

    Attributes:
        name: what computes: torch here, vllm in a process of its own environment, remote a `vllm serve` that runs already.
        device: of torch: "auto", "cpu", "cuda", "cuda:1", …
        token_budget: of torch: tokens of one pass, or "auto".
        trust_remote_code: run modelling code that the checkpoint brings.
        vllm_python: interpreter of vLLM's environment; None takes REFLOGP_VLLM_PYTHON, or this one.
        tensor_parallel: of vllm: GPUs that one model is spread over.
        vllm_options: of vllm: further arguments, of vllm.options.ALLOWED.
        url, served_model, concurrency, patience_seconds: of remote, as ServerPlace; its key is read from VLLM_API_KEY.
        check_claim: of remote: compare its values with those of the weights at hand before it is believed.
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
        """GPUs that one engine takes, where the device is settled: the group of a tensor-parallel one."""
        if self.device == "cpu" or self.name == "remote":
            return 0
        return self.tensor_parallel if self.name == "vllm" else 1

    def require_dtype(self, dtype: str) -> None:
        """Raise UsageError where this engine cannot compute in `dtype`."""
        if self.name != "torch" and autocast_dtype(dtype) is not None:
            raise UsageError(
                f"{dtype} is float32 weights under torch.autocast, which the {self.name} engine cannot compute: use the torch "
                "engine for it"
            )

    def make(self, model: str, reference: Reference) -> PassEngine:
        """The engine, loaded with exactly the files that the reference names.

        The files are opened and hashed at every load (digests of unchanged files are remembered), read through the open files,
        and compared with what they were when everything is in memory.

        Args:
            model: local folder of the model.
            reference: the model under the numerics that are wanted.

        Raises:
            OtherContentError: the folder holds another model than the reference.
            FileChangedError: it is being written to.
            UsageError, CheckpointError, EngineError: it cannot be loaded.
        """
        self.require_dtype(reference.dtype)
        for attempt in range(_LOAD_ATTEMPTS):
            try:
                return self._made(model, reference)
            except FileChangedError as error:  # permissions or a further link change a file's times too, so look again
                if isinstance(error, OtherContentError) or attempt == _LOAD_ATTEMPTS - 1:
                    raise
                gc.collect()
        raise AssertionError("unreachable")

    def _made(self, model: str, reference: Reference) -> PassEngine:
        match self.name:
            case "torch":
                with opened_as(model, reference) as opened, opened.for_loading() as checkpoint:
                    return self._torch(checkpoint, reference)
            case "vllm":
                return self._vllm(model, reference)
            case "remote":
                return self._remote(model, reference)

    def _torch(self, model: Checkpoint, reference: Reference) -> PassEngine:
        from reflogp.scoring.torch_engine import TorchEngine
        from reflogp.scoring.torch_engine.load import choose_device
        from reflogp.scoring.torch_engine.threads import run_in_own_thread

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
            """vLLM's processes open the paths by themselves, so the paths must lead to the open files before and after."""
            with opened_as(model, reference) as opened:
                opened.files.check(by_path=True)
                try:
                    yield
                finally:  # what went wrong is explained by a file that changed, where one did
                    opened.files.check(by_path=True)

        python = self.vllm_python or os.environ.get("REFLOGP_VLLM_PYTHON") or sys.executable
        with unchanged():
            loading = vllm_options(model, reference, self.tensor_parallel, self.trust_remote_code, self.vllm_options)
            process = VllmProcess(python, loading, unchanged)
        return VllmEngine(process, reference)

    def _remote(self, model: str, reference: Reference) -> PassEngine:
        from reflogp.scoring.vllm_engine.engine import VllmEngine
        from reflogp.scoring.vllm_engine.server import ServerPlace, VllmServer

        if self.url is None:
            raise UsageError("the remote engine needs the URL of a vllm serve: give --url")
        place = ServerPlace(
            self.url, self.served_model, os.environ.get("VLLM_API_KEY"), self.concurrency, self.patience_seconds
        )
        engine = VllmEngine(VllmServer(place), reference)
        engine.claim = {"reference": "claimed"}
        if self.check_claim:
            from reflogp.scoring.vllm_engine.claim import check_claim

            with opened_as(model, reference) as opened, opened.for_loading() as checkpoint:
                engine.claim = check_claim(engine, checkpoint, reference, self.device, self.trust_remote_code)
        return engine


@contextmanager
def opened_as(model: str, reference: Reference) -> Iterator[OpenModel]:
    """A model's open files. Raises OtherContentError when they are not the reference's, and as `open_model`."""
    with open_model(model, reference.dtype, lm_head_dtype=reference.lm_head_dtype) as opened:
        opened.require(reference)
        yield opened
