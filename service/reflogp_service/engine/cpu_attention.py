"""Builds, tries and calls the bfloat16 attention kernel for CPUs (cpu_attention.cpp).

torch's own kernel reaches a tenth of the rate of the products around it there, so it takes a third to two thirds of a pass.
Knows compilers and the CPU's units. Called by attention.py alone.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock

from reflogp_store import UsageError
from reflogp_store.digests import cache_dir
from reflogp_store.whole_files import appears_whole

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILE = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
_COMPILE += ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mf16c"]
#: Root mean square difference from torch's own kernel, of outputs around 1, that rounding explains; measured 0.001.
_TOLERANCE = 0.02


@cache
def problem(size: int, value_size: int) -> str | None:
    """Why the kernel cannot be used here for heads of these sizes, or None. The first call on a machine builds it (10 s)."""
    if size % 2:
        return f"heads of {size} numbers are not pairs"
    unusable = _loading_problem()
    if unusable is not None:
        return unusable
    try:
        difference = _difference_from_torch(size, value_size)
    except RuntimeError as error:  # oneDNN was told to use fewer units than the CPU has
        return f"it does not run: {str(error).splitlines()[0]}"
    return None if difference <= _TOLERANCE else f"it differs from torch's kernel by {difference:.2g}"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor,
    paths: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Each branch's queries attend to the keys on its path, causally.

    Args:
        query: (heads, tokens, head size), bfloat16; key, value: (key heads, tokens, their sizes).
        spans: int64 (branches, 3): its first own token, the end of its own tokens, how many keys come before them.
        paths: int64, the places of every branch's keys, branch after branch.
        scale: of the scores.
        window: keys that a query sees, itself included; None for all.

    Returns:
        (tokens, heads, value size), bfloat16.
    """
    query, key, value = (side if side.stride(-1) == 1 else side.contiguous() for side in (query, key, value))
    attended: torch.Tensor = torch.ops.reflogp.attend(query, key, value, spans, paths, scale, window or 0)
    return attended


@cache
def _loading_problem() -> str | None:
    if not hasattr(torch.cpu, "get_capabilities"):
        return f"torch {torch.__version__} does not say what this CPU can do"
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        return "this CPU does not multiply bfloat16 (avx512_bf16)"
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler (g++) to build it"
    try:
        torch.ops.load_library(_built(compiler))  # type: ignore[no-untyped-call]
    except subprocess.CalledProcessError as error:
        return f"{compiler} does not build it: {next((line for line in error.stderr.splitlines() if 'error' in line), '')}"
    except (OSError, UsageError) as error:
        return f"it cannot be built or loaded: {error}"
    return None


def _built(compiler: str) -> Path:
    """The compiled kernel, made by the first process that asks and kept for this source, torch and compiler."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    made_of = "\n".join([_SOURCE.read_text(), torch.__version__, version, *_COMPILE])
    folder = cache_dir() / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"attention-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            with appears_whole(library) as partial:
                _build(compiler, partial)
    return library


def _build(compiler: str, library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory() as scratch:
        made = f"{scratch}/attention.o"
        # Linked without -fopenmp: torch brings its own OpenMP, and a second one would compete with it for the cores.
        steps = [
            [*_COMPILE, f"-I{torch_folder / 'include'}", "-c", str(_SOURCE), "-o", made],
            ["-shared", made, f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10", "-o", str(library)],
        ]
        for step in steps:
            subprocess.run([compiler, *step], check=True, capture_output=True, text=True)


@torch.inference_mode()
def _difference_from_torch(size: int, value_size: int) -> float:
    """Root mean square difference between both kernels on two branches, the second of which begins with a part of the first."""
    first, second, shared = 300, 40, 100
    random = torch.Generator().manual_seed(0)

    def heads(count: int, width: int) -> torch.Tensor:
        return torch.randn(first + second, count, width, generator=random).to(torch.bfloat16).transpose(0, 1)

    query, key, value = heads(4, size), heads(2, size), heads(2, value_size)
    own = torch.arange(first, first + second)
    path = torch.cat([torch.arange(shared), own])
    spans = torch.tensor([[0, first, 0], [first, first + second, shared]])
    ours = attend(query, key, value, spans, torch.cat([torch.arange(first), path]), size**-0.5, None)
    seen = torch.ones(second, len(path), dtype=torch.bool).tril(shared)
    whole = F.scaled_dot_product_attention(
        query[None, :, :first], key[None, :, :first], value[None, :, :first], is_causal=True, enable_gqa=True
    )
    branch = F.scaled_dot_product_attention(
        query[None, :, first:], key[None, :, path], value[None, :, path], attn_mask=seen, enable_gqa=True
    )
    theirs = torch.cat([whole, branch], 2)[0].transpose(0, 1)
    return float((ours.float() - theirs.float()).square().mean().sqrt())
