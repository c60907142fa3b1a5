"""Makes what the demo's model learns: three tasks and an exercise, and the tokenizer and chat template for their text.

Held out are combinations, never words: every test can be passed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.demo.tickets import CUSTOMERS, PRODUCTS, SYSTEM_PROMPT, is_held_out, make_tickets

DATE_PROMPT = "Write the date as YYYY-MM-DD and nothing else. The day comes before the month unless the year is first."
SUM_PROMPT = "Add the two numbers and write the sum and nothing else."
COPY_PROMPT = "Repeat the text and write nothing else."

FIRST_DAY, NUM_DAYS = date(1970, 1, 1), 80 * 365
DATE_FORMS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "the {nth} of {month} {year}",
    "{day} {short} {year}",
    "{day:02}.{number:02}.{year}",
    "{year}/{number}/{day}",
)
DATE_FRAMES = ("{}", "It happened on {}.", "The meeting is on {}.", "Due: {}")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
SUM_FORMS = ("{a} + {b}", "What is {a} plus {b}?", "One costs {a}, the other {b}. How much are both?")

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


@dataclass(frozen=True, slots=True)
class Example:
    """What the user says, and all that the model must answer."""

    user: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """A system prompt, and examples without end of what is asked under it."""

    name: str
    system: str
    examples: Callable[[int, bool], Iterator[Example]]  # of a seed; held out from training or for it
    batch_size: int  # examples of it in a step of the training
    is_exercise: bool = False  # not an end in itself: has no goal, and is left out in the end


def all_tasks() -> tuple[Task, ...]:
    """Tickets, dates, sums, and copying for its own sake: attention learns it there first, and the others need it."""
    return (
        Task("tickets", SYSTEM_PROMPT, ticket_examples, batch_size=16),
        Task("dates", DATE_PROMPT, date_examples, batch_size=24),
        Task("sums", SUM_PROMPT, sum_examples, batch_size=48),
        Task("copies", COPY_PROMPT, copy_examples, batch_size=24, is_exercise=True),
    )


def ticket_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Held out: pairs of product and complaint, and order numbers."""
    for ticket in make_tickets(seed, held_out=held_out):
        yield Example(ticket.text, json.dumps(ticket.fields, separators=(",", ":")))


def date_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Held out: one day in eight, in all of its forms."""
    rng = random.Random(seed)
    while True:
        day = FIRST_DAY + timedelta(days=rng.randrange(NUM_DAYS))
        if is_held_out(day.isoformat()) == held_out:
            month = MONTHS[day.month - 1]
            said = rng.choice(DATE_FORMS).format(
                day=day.day, nth=_ordinal(day.day), month=month, short=month[:3], number=day.month, year=day.year
            )
            yield Example(rng.choice(DATE_FRAMES).format(said), day.isoformat())


def sum_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Two numbers from 0 to 99, of one digit more often than chance has it. Held out: one pair in eight."""
    rng = random.Random(seed)
    while True:
        a, b = (rng.randrange(rng.choice((10, 100, 100))) for _ in range(2))
        if is_held_out(str(a), str(b)) == held_out:
            yield Example(rng.choice(SUM_FORMS).format(a=a, b=b), str(a + b))


def copy_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Three parts, each a number of up to eight digits, a product or a customer. Held out: one text in eight."""
    rng = random.Random(seed)
    while True:
        parts = [
            rng.choice((str(rng.randrange(10 ** rng.randint(1, 8))), rng.choice(PRODUCTS), rng.choice(CUSTOMERS)))
            for _ in range(3)
        ]
        text = " ".join(parts)
        if is_held_out(text) == held_out:
            yield Example(text, text)


def _ordinal(number: int) -> str:
    suffix = "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


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
