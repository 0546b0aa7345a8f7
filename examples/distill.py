"""Distillation from stored values: the teacher is not loaded while the student trains.

    python examples/distill.py

`reflogp score --top-k` stores the teacher's most probable tokens at each position of the conversations. The student, with a
quarter of the teacher's parameters, is trained on them: the loss is the teacher's cross-entropy over these tokens and one more
class for all others, minus the teacher's own entropy (the forward KL divergence of the two distributions).
"""

import json
from pathlib import Path
from typing import Any

import torch
from common import options_of, prepare, reflogp
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from reflogp.scoring import join

TOP_K, BATCH = 16, 4


def main() -> None:
    options = options_of(__doc__, steps=40)
    prepare(options)
    chats = write_chats(options)
    reflogp("score", options.model, chats, "--store", options.store, "--dtype", "float32", "--top-k", str(TOP_K))
    rows = list(join(options.model, chats, options.store, dtype="float32", top_k=TOP_K))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    student = small_student(options.model)
    print(f"student: {student.num_parameters():,} parameters, teacher: not loaded")

    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    losses = []
    for step in range(options.steps):
        batch = [rows[(step * BATCH + at) % len(rows)] for at in range(BATCH)]
        loss = torch.cat([divergences(student, row, tokenizer) for row in batch]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("losses: " + " ".join(f"{loss:.4f}" for loss in losses))
    student.save_pretrained(options.out / "student")


def write_chats(options: Any) -> str:
    """Write the preferred conversations of the pairs as rows with `messages`; return the file's path."""
    pairs = [json.loads(line) for line in Path(options.data).read_text(encoding="utf-8").splitlines()]
    file = options.out / "chats.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": pair["prompt"] + pair["chosen"]}) + "\n" for pair in pairs), encoding="utf-8"
    )
    return str(file)


def small_student(teacher: str) -> Any:
    """Return a model with random weights and half of the teacher's width and layers."""
    config = AutoConfig.from_pretrained(teacher)
    config.hidden_size, config.intermediate_size = config.hidden_size // 2, config.intermediate_size // 2
    config.num_hidden_layers = max(1, config.num_hidden_layers // 2)
    config.head_dim = config.hidden_size // config.num_attention_heads
    config.layer_types = None
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def divergences(student: Any, row: dict[str, Any], tokenizer: Any) -> torch.Tensor:
    """Return the divergence of the student from the teacher at each position of a row, in nats, shape (tokens - 1,)."""
    ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
    logps = torch.log_softmax(student(input_ids=torch.tensor([ids])).logits[0, :-1], 1)  # of the tokens from the second on
    teacher, student_logps = torch.tensor(row["ref_top_logps"]), logps.gather(1, torch.tensor(row["ref_top_ids"]))
    teacher, student_logps = with_rest(teacher), with_rest(student_logps)
    return (teacher.exp() * (teacher - student_logps)).sum(1)


def with_rest(logps: torch.Tensor) -> torch.Tensor:
    """Append the log-prob of all other tokens together to log-probs of shape (positions, k)."""
    rest = torch.log1p(-logps.exp().sum(1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([logps, rest], 1)


if __name__ == "__main__":
    main()
