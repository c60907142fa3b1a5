"""`python -m tests.benchmarks.peers`: see options.py."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.peers.machine_busy import MachineBusy
from tests.benchmarks.peers.options import parse
from tests.benchmarks.peers.peers import PEERS, PeerMissing
from tests.benchmarks.peers.peers_report import as_json, floor_table, ratio_table
from tests.benchmarks.peers.peers_run import PeersRun
from tests.benchmarks.peers.trial_server import TrialServerFailed
from tests.benchmarks.write_figures import write_figures

EXIT_CODE_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the JSON. Returns 0; 1 if the peer is missing, a side failed or the CPU was taken."""
    options = parse(arguments)
    # As an exception, so that the sides, which are processes of their own, are ended too.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODE_TERMINATED))
    try:
        if options.peer is not None:
            PEERS[options.peer].python(options.venv)
        with _cache(options.cache) as cache:
            run = PeersRun(options, cache)
            print(run.machine, flush=True)
            for comparison in run.measure():
                print(".", comparison.workload.name, flush=True)
    except (PeerMissing, TrialServerFailed, MachineBusy) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    for name, about in run.sides.items():
        print(f"{name}: {', '.join(about.values()) or 'nothing'}")
    print(f"\n{ratio_table(run.comparisons)}")
    for name, seconds in run.command_s.items():
        print(f"{name}: `submit --wait`, start-up and polling included: {', '.join(f'{s:.2f}' for s in seconds)} s")
    print(f"\n{floor_table(run.distances)}")
    if options.json is not None:
        figures = as_json(run.machine, run.sides, run.comparisons, run.distances)
        figures["command_s"] = run.command_s
        write_figures(options.json, "peers", arguments, figures)
    return 0


@contextmanager
def _cache(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())
