"""The output layer in float32: its values, and what it casts. For CUDA stand tensors that say they are there."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from reflogp.scoring.torch_engine import head as head_module
from reflogp.scoring.torch_engine.head import Head
from tools.families import VOCAB, build

aten = torch.ops.aten
#: Rows that predict, more than one chunk of them everywhere below.
COUNT = 300
TEMPERATURE = 0.7

#: What a family does to the products of its head.
FORMS = {
    "Llama": lambda product: product,
    "Phi (partial rotary, biased head)": lambda product: product,
    "Gemma 2 (soft caps, sliding window 8)": lambda product: 5.0 * torch.tanh(product / 5.0),
    "Cohere (logit scale)": lambda product: 0.3 * product,
}


class OnCuda(torch.Tensor):
    """A tensor that says it lies on a GPU; its values lie here."""

    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_subclass(cls, values.detach().to("meta"), False, dispatch_device=True)
        made.values = values
        return made

    @property
    def device(self):
        return torch.device("cuda:0")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} without anybody watching")


class Watching(TorchDispatchMode):
    """Computes what is asked of `OnCuda` tensors as CUDA would, and remembers what was computed.

    Attributes:
        products: (shape of the left side, shape of the right side, dtypes, dtype of the product).
        made: (operator, shape) of every float32 matrix that is not a view.
    """

    def __init__(self):
        super().__init__()
        self.products, self.made = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        there = any(isinstance(arg, OnCuda) for arg in tensors)
        if there:
            assert all(isinstance(arg, OnCuda) or arg.dim() == 0 for arg in tensors), f"{function} of tensors on two devices"
        here_args, here_kwargs = tree_map_only(OnCuda, lambda tensor: tensor.values, (args, kwargs))
        if function is aten.mm.dtype:  # no CPU has it
            left, right, dtype = here_args
            assert there and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16), "as CUDA refuses"
            assert dtype == torch.float32
            out = left.float() @ right.float()
        else:
            out = function(*here_args, **here_kwargs)
        if function in (aten.mm.default, aten.mm.dtype, aten.addmm.default):
            left, right = here_args[-3:-1] if function is aten.mm.dtype else here_args[-2:]
            assert left.dtype == right.dtype
            self.products.append((tuple(left.shape), tuple(right.shape), left.dtype, out.dtype))
        if function._schema.name.endswith("_") and there:
            return args[0]
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.dim() == 2 and not function.is_view:
            self.made.append((function, tuple(out.shape)))
        return tree_map_only(torch.Tensor, OnCuda, out) if there else out


def small_blocks(monkeypatch):
    """Several chunks of rows and several blocks of columns of a vocabulary of 160."""
    monkeypatch.setattr(head_module, "_CPU_BLOCK", (64, 48))
    monkeypatch.setattr(head_module, "_WHOLE_LOGITS", {"cpu": 1 << 25, "cuda": 200 * VOCAB})


def some_states(head, dtype):
    """(states, which of them predict, what they predict)."""
    random = torch.Generator().manual_seed(1)
    states = torch.randn(COUNT + 50, head._weight.shape[1], generator=random).to(dtype)
    return states, torch.randperm(COUNT + 50, generator=random)[:COUNT], torch.randint(VOCAB, (COUNT,), generator=random)


def expected(name, head, states, at, targets):
    """log p of the targets in float64."""
    logits = FORMS[name](states[at].double() @ head._weight.double().T + (0 if head._bias is None else head._bias.double()))
    return torch.log_softmax(logits / TEMPERATURE, 1).gather(1, targets[:, None])[:, 0]


def move(head):
    head._weight, head._factors = OnCuda(head._weight.data), OnCuda(head._factors.data)
    head._bias = head._bias if head._bias is None else OnCuda(head._bias.data)


def watched(head, *inputs):
    """(values of the head, what it computed). In inference mode operators would come whole, not as what they are made of."""
    with torch.no_grad(), Watching() as watching:
        values = Head.logps.__wrapped__(head, *inputs, TEMPERATURE)
    return values, watching


def on_cuda(head, *inputs):
    """As `watched`, on the stand-in."""
    move(head)
    values, watching = watched(head, *map(OnCuda, inputs))
    return values.values, watching


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_float32_head_is_exact_to_float32(name, dtype, device, monkeypatch):
    small_blocks(monkeypatch)
    head = Head(build(name).to(dtype), float32=True)
    inputs = some_states(head, dtype)
    right = expected(name, head, *inputs)
    values = on_cuda(head, *inputs)[0] if device == "cuda" else head.logps(*inputs, TEMPERATURE)
    assert values.dtype == torch.float32
    assert (values - right).abs().max() <= 2e-6 * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_16_bits_are_multiplied_as_they_are(dtype, monkeypatch):
    """One product of 16 bits into float32 for each chunk, in whole tiles; the weight is never cast."""
    small_blocks(monkeypatch)
    head = Head(build("Llama").to(dtype), float32=True)
    _, watching = on_cuda(head, *some_states(head, dtype))
    hidden = head._weight.shape[1]
    assert watching.products == [((rows, hidden), (hidden, VOCAB), dtype, torch.float32) for rows in (128, 128, COUNT - 256)]
    assert max(rows for _, (rows, columns) in watching.made if columns == hidden) <= 128, "rows of chunks alone are cast"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("float32", [True, False])
def test_a_weight_that_must_be_cast_is_cast_once_and_in_blocks(device, float32, monkeypatch):
    """On a CPU for a float32 head; everywhere for states that are float32, as Mamba's are, above a narrower weight."""
    small_blocks(monkeypatch)
    head = Head(build("Llama").to(torch.bfloat16), float32=float32)
    hidden = head._weight.shape[1]
    monkeypatch.setattr(head_module, "_CAST_NUMBERS", 130 * hidden)
    inputs = some_states(head, torch.float32)
    right = expected("Llama", head, *inputs)
    if device == "cuda":
        values, watching = on_cuda(head, *inputs)
        blocks = [128, VOCAB - 128]
    else:
        values, watching = watched(head, *inputs)
        blocks = [48, 48, 48, VOCAB - 144]
    assert (values - right).abs().max() <= 2e-6 * right.abs().max()
    casts = [rows for function, (rows, columns) in watching.made if function is aten._to_copy.default and columns == hidden]
    chunks = COUNT // 128 + 1 if device == "cuda" else COUNT // 64 + 1  # of the targets' own rows of the weight
    assert casts[: len(blocks)] == blocks
    assert len(casts) == len(blocks) + chunks and max(casts) < VOCAB
