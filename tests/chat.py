"""A byte tokenizer with chat templates (plain, tagged, history-rewriting) and a tiny model that babbles.

Does not know any real tokenizer or model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.target import Target
from tiny import tiny_model

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


def babbler(seed: int = 3) -> Any:
    """A random Llama that says words of a few letters and ends its turns, so text can be drawn."""
    model = tiny_model("llama", seed, vocab_size=VOCAB, max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    likes = torch.full((VOCAB,), -60.0)
    for text, bias in (*((letter, 0.0) for letter in "abcdefgh"), (" ", 1.0), ("<|im_end|>", -0.5)):
        likes[tokenizer(text)["input_ids"][0]] = bias
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(2.5 if "self_attn" in name else 1.0)  # what was said long ago matters
        # A component that all embeddings share survives the layers: the head reads it as a bias.
        words = model.get_input_embeddings().weight.mul_(10.0)
        words[:, 0] = 2.0
        head = model.get_output_embeddings().weight.mul_(4.0)
        head[:, 0] = likes / 2.0
    return model


def babbling_target(template: str | None = CHATML, seed: int = 3) -> Target:
    """The model and its tokenizer behind the packed forward, fp32."""
    return Target(babbler(seed), byte_tokenizer(template), name="babbler")


def babbling_folder(folder: Path, template: str | None = CHATML, seed: int = 3) -> str:
    """The same as a model folder, for commands that take a target's name."""
    model = babbler(seed)
    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return str(folder)
