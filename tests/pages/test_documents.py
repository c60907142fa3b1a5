"""Names, links and figures in the documents are true, as far as a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine.kv_cache.tensors import KVCacheSpec
from tests.pages.__main__ import ROOT
from tests.pages.document_check import DocumentCheck, KnownNames, Markdown
from tests.support.monitoring import alert_rules

NAMES = KnownNames.of_code(ROOT)
CHECK = DocumentCheck(ROOT, NAMES)

WRONG = {
    "a setting": ("Set `engine.max_num_seq`.", "engine.max_num_seq"),
    "a setting with a value": ("`engine.kv_cache.num_block=4`", "engine.kv_cache.num_block"),
    "a setting in a command": ("```\nmillrace worker --set worker.leas_s=3\n```", "worker.leas_s"),
    "a setting of a group that holds modules": ("`engine.kv_cache.block_managr`", "engine.kv_cache.block_managr"),
    "a group": ("`limits.all.*`", "limits.all.*"),
    "a variable": ("export MILLRACE_REDIS__URI=x", "MILLRACE_REDIS__URI"),
    "a variable in Python": ("```python\nos.environ['MILLRACE_PROFIL']\n```", "MILLRACE_PROFIL"),
    "a metric": ("look at `millrace_queue_depth`", "millrace_queue_depth"),
    "the sum of what is no histogram": ("`millrace_held_units_sum`", "millrace_held_units_sum"),
    "many settings": ("`worker.reap_x*`", "worker.reap_x*"),
    "many metrics": ("`millrace_gpu_*`", "millrace_gpu_*"),
    "a command": ("`millrace sbumit F`", "millrace sbumit"),
    "an option": ("`millrace submit F --strikt`", "millrace submit --strikt"),
    "another command's option": ("```\nzcat f | millrace submit - --follow\n```", "millrace submit --follow"),
    "an option in a later line": ("```sh\nmillrace run -i a \\\n  --sumary F\n```", "millrace run --sumary"),
    "an option by itself": ("`--stricter`", "--stricter"),
    "a target": ("`make chaoss`", "make chaoss"),
    "a target in a block": ("```\nmake checks    # make what is there\n```", "make checks"),
    "a module": ("`python -m tests.benchmarks.hit_rates`", "python -m tests.benchmarks.hit_rates"),
    "a folder that cannot be run": ("`python -m tests.support`", "python -m tests.support"),
    "a module by its name": ("`tests.benchmarks.hit_rates`", "tests.benchmarks.hit_rates"),
    "a path": ("`engine/loading/memry.py`", "engine/loading/memry.py"),
    "a folder": ("`kernels/metal/`", "kernels/metal/"),
    "a file by its name": ("`block_managr.py`", "block_managr.py"),
    "many files": ("`worker/registry/scripts/*.rb`", "worker/registry/scripts/*.rb"),
    "a link": ("[so](worker/NOWHERE.md)", "worker/NOWHERE.md"),
    "a heading": ("# Here\n[so](#there)", "#there"),
    "another document's heading": ("[so](worker/DESIGN.md#no-such-thing)", "worker/DESIGN.md#no-such-thing"),
}  # fmt: skip

RIGHT = (
    "`engine.max_num_seqs`, `engine.kv_cache.num_blocks=4`, `engine.structured_output.*`, `redis.*`, `worker.reap_*`",
    "`redis.conf`, `redis.Redis`, `worker.async_client.AsyncBatchClient`, `engine.kv_cache.block_manager`",
    "MILLRACE_REDIS__URL, MILLRACE_PROFILE, names that begin with `MILLRACE_`",
    "`millrace_engine_step_seconds_bucket`, `millrace_queue_*`",
    "`zcat f | millrace submit - --wait -o out/`, a millrace carries water, `millrace:{s0}:j:`",
    "`--strict`, `--priority 2`, `--aclfile`",
    "```\nmake check     # to make sure\n```",
    "`python -m tests.pages --check`, `python -m tests.benchmarks.NAME`, `python -m venv`, `tests.support`",
    "`worker/registry/scripts/*.lua`, `prelude.lua`, `Qwen/X`, `/v1/chat/completions`, `out/`, `a/b`",
    "[the workers](worker/DESIGN.md), [outside](https://example.com/x.md)",
    "`engine.\nmax_num_seqs` is not a name, `millrace\nsubmit` is one command over two lines",
)  # fmt: skip

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("engine", "kernels", "worker", "settings", "tests")

PAGE = Path(__file__).resolve().parents[2] / "worker" / "OPERATIONS.md"
# "`EDGES` and `INSIDE` of `tests/worker/lines/test_bounds.py`": names, and the file they are in.
PLACED = re.compile(r"((?:`\w+`(?:,| and| beside)\s+)*`\w+`)\s+(?:of|in)\s+`(\w+/[\w/]+\.py)`")
KV_ROW = re.compile(r"^\| \S+ \((\d+)[^,]*, (\d+)[^)]* of (\d+)\) \| [^|]+ \| (\d+) KiB \| ([\d,]+) \|$", re.MULTILINE)


def said(text: str, document: str = "README.md") -> list[str]:
    return [str(problem) for problem in CHECK.problems(Path(document), text)]


def documents_text(*names: str) -> str:
    return "\n".join((ROOT / name).read_text() for name in names if (ROOT / name).exists())


@pytest.mark.parametrize("document", CHECK.documents(), ids=str)
def test_every_name_in_it_exists(document: Path) -> None:
    problems = CHECK.problems(document, (ROOT / document).read_text())
    assert not problems, "\n" + "\n".join(map(str, problems))


@pytest.mark.parametrize("document", CHECK.documents(), ids=str)
def test_every_figure_is_filled_in(document: Path) -> None:
    assert re.findall(r"(?:^|\| )([A-Z_]{4,})(?=$| \|)", (ROOT / document).read_text(), re.MULTILINE) == []


def test_every_setting_and_its_variable_is_in_a_document() -> None:
    words = set(re.findall(r"[\w.]+", documents_text("settings/SETTINGS.md")))
    assert set() == (NAMES.settings | NAMES.variables) - words


def test_every_metric_is_in_a_document() -> None:
    words = set(re.findall(r"\w+", documents_text("worker/METRICS.md")))
    assert {name for name in NAMES.metrics if not name.endswith(("_bucket", "_sum", "_count"))} <= words


def test_every_option_of_every_command_is_in_a_document() -> None:
    sections = documents_text("worker/COMMANDS.md").split("\n## millrace ")
    for name, options in NAMES.commands.items():
        section = next(section for section in sections if section.startswith(f"{name}\n"))
        assert options - {"--help"} <= set(re.findall(r"(?<!\w)--?[a-z][\w-]*", section)), name


@pytest.mark.parametrize("name", sorted(NAMES.commands))
def test_people_are_told_of_every_command(name: str) -> None:
    text = documents_text("README.md", "worker/OPERATIONS.md")
    assert re.search(rf"millrace {name}\b", text) is not None, f"neither README.md nor OPERATIONS.md: millrace {name}"


@pytest.mark.parametrize("name", sorted(NAMES.targets))
def test_people_are_told_of_every_make_target(name: str) -> None:
    text = documents_text("README.md", "worker/OPERATIONS.md")
    assert re.search(rf"make {name}(?![\w-])", text) is not None, f"neither README.md nor OPERATIONS.md: make {name}"


@pytest.mark.parametrize(("text", "name"), WRONG.values(), ids=WRONG)
def test_a_planted_wrong_name_is_found_with_its_line(text: str, name: str) -> None:
    [problem] = said(f"A first line.\n\n{text}\n")

    words = [line for line, words in enumerate(text.splitlines(), start=3) if name.rpartition(" ")[2] in words]
    assert problem.partition(": ")[0] in {f"README.md:{line}" for line in words} or "--" in name
    assert f": {name}: " in problem


@pytest.mark.parametrize("text", RIGHT)
def test_what_exists_is_no_problem(text: str) -> None:
    assert said(text) == []


def test_a_path_may_be_given_from_the_documents_own_folder() -> None:
    assert said("`loading/kv_pool.py`", "engine/DESIGN.md") == []
    assert said("`loading/kv_pool.py`", "kernels/DESIGN.md") != []


def test_every_name_is_one_of_the_source() -> None:
    spans = set(re.findall(r"`([^`\n]+)`", (REPOSITORY / "engine" / "EXTENDING.md").read_text()))
    names = {span.split(".")[-1] for span in spans if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", span)} - {"md", "py"}
    sources = (path.read_text() for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    assert names - words == set()
    assert len(names) > 40


def test_names_are_in_the_files_they_are_said_to_be_in() -> None:
    found = [pair for document in CHECK.documents() for pair in PLACED.findall((ROOT / document).read_text())]
    placed = [(name, ROOT / path) for names, path in found for name in re.findall(r"\w+", names)]
    assert len(placed) > 30
    assert [(name, path) for name, path in placed if name not in re.findall(r"\w+", path.read_text())] == []


@pytest.mark.parametrize("package", ["settings", "kernels", "engine", "worker"])
def test_a_packages_readme_has_each_of_its_modules(package: str) -> None:
    text = (ROOT / package / "README.md").read_text()
    modules = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    assert [path for path in modules if path.name not in text] == []


def test_every_alert_has_an_entry() -> None:
    anchors = Markdown(PAGE.read_text()).anchors
    runbooks = {rule["annotations"]["runbook"] for rule in alert_rules()}
    assert len(runbooks) > 5
    assert {runbook for runbook in runbooks if runbook.partition("#")[2] not in anchors} == set()


def test_the_table_of_kv_sizes_is_what_the_engine_computes() -> None:
    rows = KV_ROW.findall(PAGE.read_text())
    assert len(rows) == 4
    for layers, kv_heads, head_dim, kib, tokens in rows:
        spec = KVCacheSpec(int(layers), 16, int(kv_heads), int(head_dim), torch.bfloat16)
        assert spec.bytes_per_token == int(kib) * 1024
        assert abs(8 * 2**30 // spec.bytes_per_token - int(tokens.replace(",", ""))) < 100
