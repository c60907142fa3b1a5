"""Writes the pages that are made from the code; with `--check` it only says which are stale.

They are settings/SETTINGS.md, worker/METRICS.md, worker/COMMANDS.md and engine/FAMILIES.md, and the list of families in
README.md.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
from pydantic import BaseModel

from engine.checkpoint.families import DECODERS, ENCODERS, REFUSED
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import Checkpoint
from engine.loading.derived_settings import derive_for
from settings import SettingRow, Settings, Source, load_settings
from tests.support.family_table import COLUMNS, MODELS, reason
from worker.cli.main import cli
from worker.metrics import catalogue
from worker.metrics.catalogue import Metric

ROOT = Path(__file__).resolve().parents[2]

_SMALLEST_MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

_LABEL_VALUES = {
    "outcome": catalogue.OUTCOMES,
    "unit": catalogue.UNITS,
    "attempt": catalogue.ATTEMPTS,
    "end": catalogue.UNIT_ENDS,
    "status": catalogue.JOB_ENDS,
    "lane": catalogue.LANES,
    "part": catalogue.PARTS,
}


def commands_page() -> str:
    """The page of all commands with their options."""
    context = click.Context(cli, info_name="millrace")
    names = cli.list_commands(context)
    rows = ((f"[`millrace {name}`](#millrace-{name})", cli.summary_of(name)) for name in names)
    return page(
        "Commands",
        "`millrace COMMAND --help` prints the same.",
        table(("command", "what it does"), rows),
        *(_command_section(context, name) for name in names),
    )


def metrics_page() -> str:
    """The page of all metrics, by what they are about."""
    return page(
        "Metrics",
        f"{len(catalogue.METRICS)} metrics, served by each worker at `/metrics`, which is off unless "
        "`metrics.port` says where (`millrace worker --set metrics.port=9464`; containers have it on). "
        "Beside it `/healthz` answers 200 while the worker takes work, else 503 with the reasons.",
        _about(),
        _metrics_section("The worker", catalogue.WORKER_METRICS),
        _metrics_section("Its engine", catalogue.ENGINE_METRICS),
        _metrics_section("The queue, the same from every worker", catalogue.QUEUE_METRICS),
        _metrics_section("The process", catalogue.PROCESS_METRICS),
        _metrics_section("`millrace serve`, beside those of the queue and the process", catalogue.SERVER_METRICS),
        "## Labels\n\n"
        + table(("label", "values"), ((f"`{name}`", _words(values)) for name, values in _LABEL_VALUES.items())),
    )


def settings_page() -> str:
    """The page of all settings, by group, in the order of declaration."""
    rows = load_settings(environ={}).rows()
    derived = _derived_keys()
    by_group: dict[str, list[SettingRow]] = {}
    for row in rows:
        by_group.setdefault(row.key.rpartition(".")[0], []).append(row)
    sections = [_settings_section(group, about, by_group[group], derived) for group, about in _groups(Settings, "")]
    return page(
        "Settings",
        f"{len(rows)} settings. Each is set on the command line (`--set engine.max_num_seqs=64`), by the variable "
        "named below it in the environment or `.env`, or in a TOML profile that `MILLRACE_PROFILE` names; the "
        "first of these that does decides. `millrace config` shows the value in force and where it came from.",
        "Derived: left at its default, the value follows from the model and the machine; "
        "`millrace config --model DIR` shows it.",
        *sections,
    )


def families_page() -> str:
    """The page of all families: what tests show of each, and why they do not where they do not."""
    reasons = list(dict.fromkeys(why for column in COLUMNS.values() for why in column.without.values()))

    def cell(column: str, family: str) -> str:
        why = reason(column, family)
        return "yes" if why is None else f"no ({reasons.index(why) + 1})"

    head = ("models, `model_type`", *(column.title for column in COLUMNS.values()))
    rows = ((f"{models}, `{family}`", *(cell(name, family) for name in COLUMNS)) for family, models in MODELS.items())
    shown = ((column.title, f"`{column.module}`", f"`{column.test}`") for column in COLUMNS.values())
    return page(
        "Families of models",
        "Each *yes* is a test that runs for that family, on a small checkpoint with random weights; each *no* has a "
        "reason, which a test checks as well. A family that is new in `engine/checkpoint/families.py` runs in all.",
        table(head, rows),
        "\n".join(f"{number}. {why}." for number, why in enumerate(reasons, start=1)),
        "## Which test shows it",
        "Interpreted means by Triton's interpreter, which runs the kernels on a CPU; compiled ahead means at the sizes "
        "of a published model, for sm_90, and in `make slow` for sm_80. 8 bits need a CPU with AVX-512 VNNI, and on "
        "another one that test is skipped.",
        table(("column", "module", "test"), shown),
        "## Refused by name",
        "\n".join(f"- `{family}`, {why}." for family, why in REFUSED.items()),
    )


FAMILIES_OF_README = re.compile(r"(?<=<!-- make pages -->)[^<]*(?=<!-- -->)")


def readme() -> str:
    """README.md, its list of families from the table."""
    generating = ", ".join(MODELS[family] for family in DECODERS if reason("generates", family) is None)
    others = ", ".join(MODELS[family] for family in ENCODERS if reason("embeds", family) is None)
    families = f"{generating}; for embeddings, scores, rerankings and classes these, {others}"
    return FAMILIES_OF_README.sub(families, (ROOT / "README.md").read_text(), count=1)


PAGES: Mapping[str, Callable[[], str]] = {
    "README.md": readme,
    "engine/FAMILIES.md": families_page,
    "settings/SETTINGS.md": settings_page,
    "worker/METRICS.md": metrics_page,
    "worker/COMMANDS.md": commands_page,
}


def stale_pages(root: Path = ROOT) -> dict[str, str]:
    """Pages that are missing or differ from what the code says, with the text they should have."""
    wanted = {name: write() for name, write in PAGES.items()}
    return {name: text for name, text in wanted.items() if _text(root / name) != text}


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _settings_section(group: str, about: str, rows: list[SettingRow], derived: frozenset[str]) -> str:
    cells = [
        (
            f"`{row.key}`<br>`{row.variable}`",
            plain(row.accepted) + (f" ({row.unit})" if row.unit else ""),
            f"`{row.default_text}`{', derived' if row.key in derived else ''}",
            plain(row.description),
        )
        for row in rows
    ]
    return f"## {group}\n\n{about}\n\n{table(('setting, variable', 'accepted', 'default', 'what it does'), cells)}"


def _groups(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """The groups of settings, each with its class' docstring."""
    for name, field in model.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            yield f"{prefix}{name}", " ".join((inspect.getdoc(group) or "").split())
            yield from _groups(group, f"{prefix}{name}.")


def _derived_keys() -> frozenset[str]:
    """Settings that the engine fills in for a decoder. They are the same on every machine; their values are not."""
    config: Mapping[str, object] = _SMALLEST_MODEL
    derived = derive_for(
        load_settings(environ={}),
        Path("model"),
        ModelConfig.from_hf(config),
        open_checkpoint=lambda path: Checkpoint({}),
    )
    return frozenset(key for key in derived.origins if derived.source_of(key) in {Source.DERIVED, Source.ESTIMATED})


def _about() -> str:
    """The catalogue's docstring, with its constants replaced by their values."""
    text = inspect.getdoc(catalogue) or ""
    return re.sub(r"\b[A-Z]+_[A-Z_]+\b", lambda match: f"{getattr(catalogue, match[0])}", text)


def _metrics_section(title: str, metrics: Sequence[Metric]) -> str:
    rows = ((f"`{metric.name}`", metric.kind, _words(metric.labels), _meaning(metric)) for metric in metrics)
    return f"## {title}\n\n{table(('metric', 'type', 'labels', 'what it is'), rows)}"


def _meaning(metric: Metric) -> str:
    if not metric.buckets:
        return plain(metric.help)
    return f"{plain(metric.help)} Buckets up to {', '.join(f'{bound:g}' for bound in metric.buckets)}."


def _words(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _command_section(parent: click.Context, name: str, group: click.Group = cli) -> str:
    command = group.get_command(parent, name)
    if command is None:
        raise LookupError(name)
    # A width beyond every line: nothing is wrapped, on whatever terminal.
    context = click.Context(command, info_name=name, parent=parent, terminal_width=10_000, max_content_width=10_000)
    path, mark = context.command_path, "##" if group is cli else "###"
    arguments = " ".join(command.collect_usage_pieces(context))
    options = (option.get_help_record(context) for option in command.params if isinstance(option, click.Option))
    rows = ((f"`{spelling}`", plain(" ".join(meaning.split()))) for spelling, meaning in filter(None, options))
    about = plain(inspect.cleandoc(command.help or "")).replace("\n- ", "\n\\- ")  # the file, not an item of a list
    if isinstance(command, click.Group):
        parts = [_command_section(context, part, command) for part in command.list_commands(context)]
        return "\n\n".join([f"{mark} {path}\n\n{about}", *parts])
    return f"{mark} {path}\n\n`{path} {arguments}`\n\n{about}\n\n{table(('option', 'what it does'), rows)}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. In a cell `|` is escaped and a line's end becomes a space."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def plain(text: str) -> str:
    """Text with its markup escaped, except in code spans."""
    parts = text.split("`")
    return "`".join(
        part if index % 2 else re.sub(r"(\*|<(?=[/a-zA-Z]))", r"\\\1", part) for index, part in enumerate(parts)
    )


def page(title: str, *parts: str) -> str:
    """A page that `make pages` writes."""
    note = "<!-- Written by `make pages` from the code; edit that. -->"
    return "\n\n".join([note, f"# {title}", *parts]) + "\n"


def main() -> int:
    """Write stale pages, or with `--check` only name them. Returns 1 if one is left stale."""
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
