"""`millrace quantize`: a checkpoint with weights of 4 or 8 bits."""

from __future__ import annotations

from pathlib import Path

import click

from engine.loading.quantize import DEFAULT_GROUP_SIZE, FORMATS, quantise_checkpoint, scheme_named
from worker.cli.exit_codes import BadUsage, refusals_in_a_line
from worker.doctor.machine import size_text


@click.command("quantize")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--scheme", required=True, type=click.Choice(tuple(FORMATS)),
    help="w4a16: integers of 4 bits in groups, activations as they are; w8a8: integers of 8 bits a channel, "
    "activations rounded a token; fp8: the same in float8 e4m3.",
)  # fmt: skip
@click.option(
    "--group-size", type=click.IntRange(min=8), metavar="N",
    help=f"Inputs that share a scale, of w4a16 alone.  [default: {DEFAULT_GROUP_SIZE}]",
)  # fmt: skip
@click.option(
    "--calibrate", type=click.Path(path_type=Path), metavar="FILE",
    help="Prompts, a line each, of w4a16 alone: round by GPTQ's update, so that layers answer these as they did. "
    "Reads the first 2,048 tokens of each; some hundred are enough.",
)  # fmt: skip
def quantize(directory: Path, target: Path, scheme: str, group_size: int | None, calibrate: Path | None) -> None:
    """Write the checkpoint DIR with its linear layers quantised into the new directory OUT.

    Rounded to the nearest unless calibrated, in compressed-tensors' format, which vLLM and transformers load too.
    Embeddings, norms, heads and routers stay as they are.
    """
    for option, value in (("--group-size", group_size), ("--calibrate", calibrate)):
        if value is not None and scheme != "w4a16":
            raise BadUsage(f"{option} {value}: not with --scheme {scheme}; accepted: with --scheme w4a16")
    group = group_size or DEFAULT_GROUP_SIZE
    with refusals_in_a_line():
        num_bytes = quantise_checkpoint(directory, target, scheme, group, calibrate)
    click.echo(f"{target}: {scheme_named(scheme, group)}; {size_text(num_bytes)} of weights")
