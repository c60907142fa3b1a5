"""The demo model's tokenizer, made once: it takes two seconds."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tests.demo_model.tasks import all_tasks, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer(all_tasks(), seed=0)
