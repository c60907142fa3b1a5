"""Writes the pages that are made from the code; with `--check` it only says which are stale."""

from __future__ import annotations

import argparse
import sys

from tests.pages.generated_pages import ROOT, stale_pages


def main() -> int:
    """The exit code: 1 if a page was stale and is not to be written."""
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    is_check = parser.parse_args().check
    stale = stale_pages()
    for name, text in stale.items():
        print(f"{name}: {'stale, run make pages' if is_check else 'written'}")
        if not is_check:
            (ROOT / name).write_text(text)
    return 1 if stale and is_check else 0


if __name__ == "__main__":
    sys.exit(main())
