"""A byte tokenizer with chat templates: plain, with generation tags, and one that rewrites history.

Does not know any real tokenizer.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tags leave out the end of turn, as published templates do by mistake.
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thinking is shown in the last turn only; without it an empty block, as Qwen3 does.
THINKING = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n{{ m['reasoning_content'] or '' }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
VOCAB = 259  # 256 bytes, one merge, two special tokens


def byte_tokenizer(template: str | None = CHATML) -> Any:
    """One token per byte, except two line feeds, which are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    line = "\u010a"  # how byte-level BPE spells a line feed
    vocab = {letter: i for i, letter in enumerate([*alphabet, line + line])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[(line, line)]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer
