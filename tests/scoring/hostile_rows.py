"""Rows that mean harm, and a tokenizer whose template does what a row tells it."""

import copy
import json

#: Obeys the first message: hangs in a loop or in one operation, eats memory, says a long text; otherwise an honest template.
OBEDIENT = (
    "{% set order = messages[0].content if messages else '' %}"
    "{% if order == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if order == 'power' %}{% set n = 9 %}{{ n ** (n ** (n ** n)) }}{% endif %}"
    "{% if order == 'memory' %}{{ 'a' * 99999999999 }}{% endif %}"
    "{% if order == 'speak' %}{{ raise_exception('A' * 1000000) }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if thinking %}!{% endif %}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def obedient(tokenizer):
    """The tokenizer with that template."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = OBEDIENT
    return other


def pair(content="What is 2+2?", **more) -> dict:
    """A conversational pair."""
    return {
        "prompt": [{"role": "user", "content": content}],
        "chosen": [{"role": "assistant", "content": "4."}],
        "rejected": [{"role": "assistant", "content": "5, I think."}],
        **more,
    }


def write_raw(file, rows: list) -> object:
    """JSON Lines as a client might send them: escapes instead of characters, NaN, halves of surrogate pairs, or raw text."""
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file
