"""Run the Triton kernel of the log-sum-exp in Triton's interpreter; print its errors, and how many logits it read."""

from __future__ import annotations

import json

import torch
from triton.runtime import interpreter

from reflogp.scoring.torch_engine.log_sum_exp import Logits
from reflogp.scoring.torch_engine.triton_log_sum_exp import reduce
from tests.scoring.test_log_sum_exp import largest_errors

ROWS, COLUMNS = 3, 9001

errors = largest_errors(reduce)
builder = interpreter.interpreter_builder
masked_load, load = builder.create_masked_load, builder.create_load
read = []


def counted_masked_load(pointer, mask, *arguments):
    read.append(int(mask.data.sum()))
    return masked_load(pointer, mask, *arguments)


builder.create_masked_load = counted_masked_load
product = torch.randn(ROWS, COLUMNS).to(torch.bfloat16)
reduce(product, Logits(), 1.0, torch.zeros(ROWS, dtype=torch.int64))
print(json.dumps({"errors": errors, "read": sum(read), "rows": ROWS, "logits": product.numel()}))
