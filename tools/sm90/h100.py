"""Make torch and Triton compile for an H100 without a GPU. Nothing is executed on a device.

torch, built for CUDA, computes with fake tensors on "cuda:0": they have a shape, a dtype, strides and a device, but no values.
Inductor compiles graphs for this device as usual, and Triton builds the machine code of each kernel. Where compiled code would
run, the graph that it was compiled from runs on the fake tensors instead.

The library made from no_driver.c must be loaded before torch (LD_PRELOAD).
"""

from __future__ import annotations

import copy
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._higher_order_ops.flex_attention import flex_attention
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction, MockTensor

DEVICE = torch.device("cuda", 0)
#: Bytes of shared memory that a block of threads can use.
SHARED_MEMORY = 232_448
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=SHARED_MEMORY,
)


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel as compiled for an H100.

    Attributes:
        part: part of a pass that calls the kernel: "attention", "head" or "layers".
        shared: bytes of shared memory that a block of threads uses.
        registers: registers that a thread uses.
        stack: bytes of local memory that a thread uses, because its values do not fit in registers.
        code: the kernel's TTIR, the first form into which Triton translates it.
    """

    name: str
    part: str
    shared: int
    registers: int
    stack: int
    code: str


@dataclass
class Record:
    """What has been compiled, and how often the host has waited for the device.

    Attributes:
        kernels: one kernel for each kernel function and combination of argument types. Of the configurations that Inductor
            would choose from by measuring them on the device, the one that uses the least stack, then the least shared memory.
        graphs: the part (see `Kernel`) that each compiled graph belongs to.
        waits: for each kind of operation for which the host waits, the number of calls. A “copy” is from or to the host.
        part: the part that the graph belongs to that is being compiled.
    """

    kernels: list[Kernel] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    part: str = ""


_record = Record()


@contextmanager
def recorded() -> Iterator[Record]:
    """Record what is compiled while the `with` block runs. Blocks must not be nested."""
    global _record
    _record = Record()
    yield _record


#: What operations return that need values of a fake tensor, which is their first argument.
_ANSWERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allclose": lambda tensor: True,
    "equal": lambda tensor: True,
    "_local_scalar_dense": lambda tensor: torch.ones((), dtype=tensor.dtype).item(),
    "nonzero": lambda tensor: tensor.new_empty(getattr(tensor, "nonzero_on_host", 1), tensor.ndim, dtype=torch.int64),
}


class FakeTensors(fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes tensors on the device fake. Tensors on the host stay real; those that are copied from the device are 0.

    `nonzero` of a tensor returns as many indices as there were before the tensor was copied to the device, or one index if the
    tensor was computed there.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # the cache would skip operations within operations, and so their count

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first, kwargs = getattr(func, "overloadpacket", func).__name__, next(iter(args), None), kwargs or {}
        leaves = tree_leaves((args, kwargs))
        devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        if DEVICE not in devices and not any(isinstance(leaf, fake_tensor.FakeTensor) for leaf in leaves):
            return first if name in ("pin_memory", "_pin_memory") else func(*args, **kwargs)
        if not isinstance(first, torch.Tensor):
            return super().dispatch(func, types, args, kwargs)
        if name in ("to", "_to_copy") and devices and devices[0].type != first.device.type:
            _record.waits["copy"] += not kwargs.get("non_blocking")
            return self._copy(first, devices[0], *(leaf for leaf in leaves if isinstance(leaf, torch.dtype)))
        if name == "copy_" and args[1].device.type != first.device.type:
            _record.waits["copy"] += not (kwargs.get("non_blocking") or args[2:] == (True,))
            return first if first.device == DEVICE else first.zero_()
        if name in _ANSWERS:
            _record.waits[name] += 1
            return _ANSWERS[name](first)
        if name == "scaled_dot_product_attention":  # torch would ask the driver which kernel suits the device
            return first.new_empty(*first.shape[:-1], args[2].shape[-1])
        return super().dispatch(func, types, args, kwargs)

    def _copy(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        if device.type == "cpu":
            return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=device)
        with self:
            made = torch.empty_like(tensor, device=device, dtype=dtype)
        made.nonzero_on_host = int(tensor.count_nonzero())  # type: ignore[attr-defined]
        return made


class _HostGenerator(torch.Generator):
    """A generator of random numbers on the host, whichever device it is asked for."""

    def __new__(cls, device: Any = None) -> _HostGenerator:
        return super().__new__(cls)


class _Driver:
    """Triton's driver for the device. It neither loads nor launches kernels."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend() -> None:
    """Make this process compile for an H100 from now on."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_lazy_init": None,
        "get_device_properties": _PROPERTIES,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (80 << 30, 80 << 30),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        for place in (torch.cuda, CudaInterface):
            setattr(place, name, staticmethod(lambda *args, answer=answer, **keywords: answer))
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (torch, "Generator", _HostGenerator),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", True),
        (import_utils, "is_fake_tensor", lambda tensor: False),  # transformers would do what it does while tracing
        (compile_fx, "compile_fx", _compile_graphs),
        (CachingAutotuner, "precompile", _compile_configurations),
        (JITFunction, "run", _compile_only),
        (inductor_config, "compile_threads", 1),
        (inductor_config, "fx_graph_cache", False),
        (inductor_config, "use_static_triton_launcher", False),
        (inductor_config, "joint_graph_constant_folding", False),  # computes values on the device
        (functorch_config, "enable_autograd_cache", False),
    )
    for place, name, value in replaced:
        setattr(place, name, value)
    flex_attention.py_impl(FakeTensors)(flex_attention.python_key_table[fake_tensor.FakeTensorMode])
    backends["nvidia"] = Backend(backends["nvidia"].compiler, _Driver)
    triton.runtime.driver.set_active(_Driver())


def forget() -> None:
    """Forget all compiled graphs and kernels, as if the process were new."""
    torch._dynamo.reset()
    while _called:
        _called.pop().device_caches.clear()


_compile_all, _compile_kernels, _run_kernel = compile_fx.compile_fx, compile_fx.compile_fx_inner, JITFunction.run
_called: list[Any] = []


def _compile_graphs(graph: Any, inputs: Any, inner_compile: Any = None, **options: Any) -> Any:
    return _compile_all(graph, inputs, inner_compile or _compile_graph, **options)


def _compile_graph(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Compile the kernels of a graph for the device; return a function that runs the graph on fake tensors."""
    _record.part = _part(graph)
    _compile_kernels(copy.deepcopy(graph), inputs, **options)
    _record.graphs.append(_record.part)

    def run(arguments: list[Any]) -> Any:
        return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _part(graph: torch.fx.GraphModule) -> str:
    operations = {getattr(node.target, "__name__", "") for node in graph.graph.nodes}
    if "flex_attention" in operations:
        return "attention"
    return "head" if operations & {"logsumexp.default", "log.default"} else "layers"


def _compile_configurations(tuner: Any, *args: Any, **keywords: Any) -> None:
    """Compile all configurations of an Inductor kernel, and record one. Fail like torch if none can run on the device."""
    tuner._precompile_worker()
    made = [_kernel(result.kernel, _record.part) for result in tuner.compile_results]
    best = min(made, key=lambda kernel: (kernel.shared > SHARED_MEMORY, kernel.stack, kernel.shared))
    _record.kernels.append(best)
    if best.shared > SHARED_MEMORY:
        error = OutOfResources(best.shared, SHARED_MEMORY, "shared memory")
        raise RuntimeError(f"No valid triton configs. OutOfResources: {error}")


def _compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    """Compile a kernel that is called without Inductor. Such a kernel belongs to the head."""
    _called.append(function)
    before = {id(kernel) for cache in function.device_caches.values() for kernel in cache[0].values()}
    described = [MockTensor(value.dtype, value.shape) if isinstance(value, torch.Tensor) else value for value in args]
    compiled = _run_kernel(function, *described, grid=grid, warmup=True, **keywords)
    if id(compiled) not in before:
        _record.kernels.append(made := _kernel(compiled, "head"))
        if made.shared > SHARED_MEMORY:
            raise OutOfResources(made.shared, SHARED_MEMORY, "shared memory")


def _kernel(compiled: Any, part: str) -> Kernel:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        words = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    made = compiled.metadata
    return Kernel(made.name, part, made.shared, numbers["REG"], numbers["STACK"], compiled.asm["ttir"])
