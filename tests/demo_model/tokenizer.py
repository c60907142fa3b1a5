"""The model's tokenizer and chat template, made from the tasks' own text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.demo_model.example import Example
from tests.demo_model.task import Task

VOCAB_SIZE = 1280
CORPUS_EXAMPLES = 2000  # of each task
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", END)
# The same text as `prompt_text` and `question_text` make, which a test holds together.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)


def prefix_text(task: Task) -> str:
    """What every prompt of a task begins with."""
    return f"<|im_start|>system\n{task.system}<|im_end|>\n"


def question_text(example: Example) -> str:
    """The rest of the prompt."""
    return f"<|im_start|>user\n{example.user}<|im_end|>\n<|im_start|>assistant\n"


def make_tokenizer(tasks: Sequence[Task], seed: int) -> Tokenizer:
    """Byte-level BPE in which every digit is a token, so that a number is copied and added digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(tasks, seed), trainer)
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of one of SPECIAL_TOKENS. Raises KeyError."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _corpus(tasks: Sequence[Task], seed: int) -> Iterator[str]:
    for task in tasks:
        yield prefix_text(task)
        for example in islice(task.examples(seed, False), CORPUS_EXAMPLES):
            yield question_text(example)
            yield example.answer
