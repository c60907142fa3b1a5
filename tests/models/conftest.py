"""Counts where a continuation left the reference at a tie, and prints it at the end of the run."""

from __future__ import annotations

import pytest

TIES = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    """An empty account."""
    config.stash[TIES] = {"continuations": 0, "ties": 0}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line, whatever the verbosity."""
    account = config.stash[TIES]
    if account["continuations"]:
        terminalreporter.write_line(
            f"parity with transformers: {account['continuations']} greedy continuations of 64 tokens compared, "
            f"{account['ties']} differ from a step on where the reference's two best logits lie within 1e-4"
        )
