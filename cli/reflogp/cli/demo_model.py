"""Build a small reference model for the demo and for tests, without a network.

The tokenizer and the model are trained on the caller's conversations. The model is a Llama with a few million parameters,
trained just long enough that its log-probs are not random.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Number of training steps. It is just large enough that the log-probs are not random.
STEPS = 60
#: Special tokens: padding, EOS, and one token for each role of the chat template below.
_SPECIAL = ["<|pad|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: list[str], vocab_size: int = 4096) -> Any:
    """Train and return a byte-level BPE tokenizer with padding and EOS tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|eos|>")
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def build_model(
    folder: Path,
    conversations: list[list[dict[str, str]]],
    *,
    steps: int = STEPS,
    batch: int = 8,
    advance: Callable[[int, int], None] = lambda steps, tokens: None,
) -> None:
    """Train a small model and its tokenizer on conversations (lists of messages), and save both in `folder`.

    0 steps leave the weights random. `advance` is called after each step with 1 and the step's number of tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer([message["content"] for messages in conversations for message in messages])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        picked = torch.randint(len(conversations), (batch,), generator=order).tolist()
        texts = [tokenizer.apply_chat_template(conversations[i], tokenize=False) for i in picked]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=384)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        advance(1, inputs["attention_mask"].sum().item())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
