from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest
import tokenizers

from engine.text.tokenizer import Tokenizer
from tests.demo_model.tasks import all_tasks
from tests.demo_model.tokenizer import prefix_text, question_text, save_tokenizer
from worker.demo.tickets import CUSTOMERS, PRODUCTS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def saved(tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As the engine reads it."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, path)
    return Tokenizer.from_directory(path)


def test_every_digit_is_a_token(saved: Tokenizer) -> None:
    texts = [saved.token_text(token) for token in range(saved.vocab_size)]

    assert [text for text in texts if any(c.isdigit() for c in text)] == list("0123456789")


def test_products_and_names_are_a_token_each_in_a_sentence_and_in_json(saved: Tokenizer) -> None:
    for word in (*PRODUCTS, *CUSTOMERS):
        assert len(saved.encode(f" {word}")) == len(saved.encode(word)) == 1


def test_the_chat_template_makes_the_prompts_that_were_trained_on(saved: Tokenizer) -> None:
    assert saved.chat_template is not None
    for task in all_tasks():
        [example] = islice(task.examples(1, True), 1)
        messages = [{"role": "system", "content": task.system}, {"role": "user", "content": example.user}]
        assert saved.chat_template.render(messages, NOW) == prefix_text(task) + question_text(example)
