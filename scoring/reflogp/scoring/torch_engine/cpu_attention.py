"""Build, test and call the bfloat16 attention kernel for CPUs (cpu_attention.cpp).

On CPUs with bfloat16 instructions, torch's own attention kernel performs only a tenth as many operations per second as the
matrix products before and after it. With torch's kernel, attention would take a third to two thirds of the time of a forward
pass.
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

from reflogp.store.digests import cache_dir
from reflogp.store.files import own_folder, write_atomically

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILE = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
_COMPILE += ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mf16c"]
#: Largest root mean square difference from torch's own kernel that rounding can explain. The measured difference was 0.00005
#: for outputs around 0.2.
_TOLERANCE = 0.002
#: Time limit for each build step, and for waiting while another process builds the kernel, in seconds.
_PATIENCE = 300


@cache
def problem(size: int, value_size: int) -> str | None:
    """Return why the kernel cannot be used on this machine for these head sizes, or None if it can.

    The first call on a machine takes about 10 s, because it builds the kernel.
    """
    if size % 2:
        return f"head size {size} is odd, but the kernel supports only even head sizes"
    unusable = _loading_problem()
    if unusable is not None:
        return unusable
    try:
        difference = _difference_from_torch(size, value_size)
    except RuntimeError as error:  # oneDNN may be configured not to use all of the CPU's instructions
        return f"the kernel does not run: {str(error).splitlines()[0]}"
    return None if difference <= _TOLERANCE else f"the kernel's outputs differ from torch's by {difference:.2g} (RMS)"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor,
    paths: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute causal attention: each query attends only to keys on its branch's path (see packing.py), up to its own key.

    Args:
        query: queries, bfloat16 (heads, tokens, head size).
        key: keys, bfloat16 (key heads, tokens, head size).
        value: values, bfloat16 (key heads, tokens, value size).
        spans: int64 (branches, 3): for each branch, the index of its first token, the index after its last token, and the
            number of keys on the branch's path before that first token.
        paths: int64, the indices of each branch's keys, concatenated in the order of the branches.
        window: maximum number of keys that a query attends to, including its own key; None for no limit.

    Returns:
        The attention output, bfloat16 (tokens, heads, value size).
    """
    query, key, value = (side if side.stride(-1) == 1 else side.contiguous() for side in (query, key, value))
    attended: torch.Tensor = torch.ops.reflogp.attend(query, key, value, spans, paths, scale, window or 0)
    return attended


@cache
def _loading_problem() -> str | None:
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        return "this CPU has no bfloat16 instructions (avx512_bf16)"
    compiler = shutil.which("g++")
    if compiler is None:
        return "the kernel cannot be built without a C++ compiler: install g++"
    try:
        library = _built(compiler)
        if not hasattr(torch.ops.reflogp, "attend"):  # registering the kernel twice would abort the process
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except subprocess.CalledProcessError as error:
        first_error = next((line for line in error.stderr.splitlines() if "error" in line), "")
        return f"{compiler} cannot compile the kernel: {first_error}"
    except Exception as error:  # folders, locks and loaders fail in many ways; torch's own kernel is used instead
        return f"the kernel cannot be built or loaded: {error.__cause__ or error}"
    return None


def _built(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    made_of = "\n".join([_SOURCE.read_text(), torch.__version__, str(torch.version.git_version), version, *_COMPILE])
    folder = own_folder(cache_dir(), "kernels")  # only this user can write to this folder, because its files are executed
    library = folder / f"attention-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    with FileLock(library.with_suffix(".lock"), timeout=_PATIENCE):
        if not library.exists():
            with write_atomically(library) as partial:
                _build(compiler, partial)
    return library


def _build(compiler: str, library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory() as scratch:
        made = f"{scratch}/attention.o"
        # Link without -fopenmp: torch brings its own OpenMP runtime, and a second one would compete with it for the cores.
        steps = [
            [*_COMPILE, f"-I{torch_folder / 'include'}", "-c", str(_SOURCE), "-o", made],
            ["-shared", made, f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10", "-o", str(library)],
        ]
        for step in steps:
            subprocess.run([compiler, *step], check=True, capture_output=True, text=True, timeout=_PATIENCE)


@torch.inference_mode()
def _difference_from_torch(size: int, value_size: int) -> float:
    """Return the largest root mean square difference between this kernel's outputs and those of torch's kernel."""
    first, second, shared, window = 300, 40, 100, 50
    random = torch.Generator().manual_seed(0)

    def heads(count: int, width: int) -> torch.Tensor:
        return torch.randn(first + second, count, width, generator=random).to(torch.bfloat16).transpose(0, 1)

    query, key, value = heads(4, size), heads(2, size), heads(2, value_size)
    spans = torch.tensor([[0, first, 0], [first, first + second, shared]])
    paths = [torch.arange(first), torch.cat([torch.arange(shared), torch.arange(first, first + second)])]
    differences = []
    for seen in (None, window):
        ours = attend(query, key, value, spans, torch.cat(paths), size**-0.5, seen).float()
        for (start, stop, before), path in zip(spans.tolist(), paths, strict=True):
            mask = torch.ones(stop - start, len(path), dtype=torch.bool).tril(before)
            if seen is not None:
                mask &= ~mask.tril(before - seen)
            sides = (query[None, :, start:stop], key[None, :, path], value[None, :, path])
            theirs = F.scaled_dot_product_attention(*sides, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
            differences.append(float((ours[start:stop] - theirs.float()).square().mean().sqrt()))
    return float(torch.tensor(differences).max())
