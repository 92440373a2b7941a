# SPDX-License-Identifier: Apache-2.0
"""What a trainer reads: a random Llama of two layers, its tokenizer, and sums to learn."""

from pathlib import Path

import pandas
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATE = (
    "{% for one in messages %}{{ one['role'] }} : {{ one['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def make_inputs(folder: Path) -> None:
    """Write the model, the conversations of SFT and the prompts of GRPO into a folder."""
    torch.manual_seed(0)
    words = [*SPECIAL.values(), "user", "assistant", ":", *map(str, range(100)), "+", "=", "?"]
    raw = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE, **SPECIAL)
    tokenizer.save_pretrained(folder / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, **tokens)).save_pretrained(folder / "model")

    sums = [(first, second) for first in range(16) for second in range(8)]
    asked = [[{"role": "user", "content": f"{first} + {second} = ?"}] for first, second in sums]
    answers = [{"role": "assistant", "content": str(first + second)} for first, second in sums]
    told = [[*prompt, answer] for prompt, answer in zip(asked, answers, strict=True)]
    pandas.DataFrame({"messages": told}).to_parquet(folder / "sft.parquet")
    rewards = [{"style": "rule", "ground_truth": answer["content"]} for answer in answers]
    rows = {"data_source": "sums", "prompt": asked, "ability": "math", "reward_model": rewards}
    pandas.DataFrame(rows | {"extra_info": [{"index": row} for row in range(len(sums))]}).to_parquet(
        folder / "grpo.parquet"
    )
