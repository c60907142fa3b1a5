"""How each kind of value is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings import ProfileSettings, SettingsError, load_settings
from settings.catalogue import Catalogue
from settings.fields import FALSE_WORDS, TRUE_WORDS, read_boolean, read_names, read_number, read_whole_number, write

pytestmark = pytest.mark.usefixtures("bare_environment")

SPECS = Catalogue.read().specs
SWITCHES = [key for key, spec in SPECS.items() if spec.kind is bool]

KEY = "engine.cuda_graphs.batch_sizes"

FILTERED = ProfileSettings(every_steps=1, max_tokens=128, min_seqs=4)


def value_of(key: str, raw: object) -> object:
    """What `raw` means for `key`."""
    return load_settings({key: raw}, environ={}).as_json()[key]["value"]


@pytest.mark.parametrize(
    ("text", "names"),
    [(None, ()), ("a", ("a",)), (" Qwen/Qwen3-8B , *,b c", ("Qwen/Qwen3-8B", "*", "b c")), ("x" * 256, ("x" * 256,))],
)
def test_names_are_separated_by_commas(text: str | None, names: tuple[str, ...]) -> None:
    assert read_names(text) == names


@pytest.mark.parametrize("text", ["a,", ",", "a,a", "x" * 257, "a\tb", "a\x06b"])
@pytest.mark.parametrize("key", ["model.aliases", "limits.models"])
def test_what_are_no_names_is_refused(key: str, text: str) -> None:
    with pytest.raises(SettingsError, match="accepted: names of 1 to 256 characters, separated by commas"):
        value_of(key, text)


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "\u2028", "a\u00a0b"])
def test_a_name_that_cannot_be_printed_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="accepted: a name of 1 to 256 characters that can be printed"):
        value_of("model.name", name)


def test_there_are_switches_to_test() -> None:
    assert "engine.prefix_cache.enabled" in SWITCHES
    assert len(SWITCHES) >= 9


@pytest.mark.parametrize("key", SWITCHES)
def test_every_switch_reads_the_same_words(key: str) -> None:
    # In the seed PREFIX_CACHE=true meant off, MOE_BATCHED=false meant on, and MOE_PROFILE=0 meant on.
    for word in TRUE_WORDS:
        assert value_of(key, word) is True
        assert value_of(key, word.upper()) is True
    for word in FALSE_WORDS:
        assert value_of(key, word) is False
        assert value_of(key, word.capitalize()) is False


@pytest.mark.parametrize("text", ["", " ", "2", "-1", "01", "t", "y", "enable", "auto", " true", "true ", "1.0", "0x1"])
@pytest.mark.parametrize("key", SWITCHES)
def test_no_switch_reads_anything_else(key: str, text: str) -> None:
    with pytest.raises(SettingsError, match=r"accepted: true, on, yes, 1 or false, off, no, 0(, or none)?$"):
        value_of(key, text)


@pytest.mark.parametrize("key", SWITCHES)
def test_none_is_read_by_the_switches_that_the_engine_may_decide(key: str) -> None:
    if SPECS[key].optional:
        assert value_of(key, "none") is None
    else:
        with pytest.raises(SettingsError, match=r"accepted: true, on, yes, 1 or false, off, no, 0$"):
            value_of(key, "none")


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "65537",
        "-1",
        "+8",
        "8 ",
        " 8",
        "1_000",
        "1.0",
        "1e3",
        "08",
        "0x10",
        "\u0661",
        "",
        "lots",
        "none",
        "9" * 5000,
    ],
)
def test_an_invalid_number_never_turns_into_the_default(text: str) -> None:
    with pytest.raises(SettingsError, match=r"accepted: a whole number, 1 to 65536$"):
        value_of("engine.max_num_seqs", text)


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("64", 64), ("2048", 2048)])
def test_a_whole_number_is_its_digits(text: str, value: int) -> None:
    assert value_of("engine.max_num_seqs", text) == value


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "1e999", "0", "-0.1", "1.01", ".5", "1.", "0,5", "50%", " 0.5", ""]
)
def test_an_invalid_fraction_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"accepted: a number above 0, at most 1$"):
        value_of("engine.kv_cache.memory_fraction", text)


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("0.25", 0.25), ("5e-1", 0.5)])
def test_a_fraction_may_have_an_exponent(text: str, value: float) -> None:
    assert value_of("engine.kv_cache.memory_fraction", text) == value


def test_choices_and_none_are_read_in_any_letter_case() -> None:
    assert value_of("engine.dtype", "BFloat16") == "bfloat16"
    assert value_of("engine.max_model_len", "None") is None


@pytest.mark.parametrize(
    "key", ["model.path", "model.name", "engine.max_model_len", "engine.seed", "redis.url", "log.level"]
)
def test_an_empty_value_is_refused_not_taken_for_unset(key: str) -> None:
    with pytest.raises(SettingsError, match=f"^--set {key}='': accepted: "):
        value_of(key, "")


def test_none_is_refused_where_a_value_is_needed() -> None:
    with pytest.raises(SettingsError, match=r"^--set worker\.lease_s=none: accepted: a number, 0\.1 to 86400$"):
        value_of("worker.lease_s", None)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256])
def test_a_block_holds_a_power_of_two_of_tokens(size: int) -> None:
    assert value_of("engine.kv_cache.block_size", str(size)) == size


@pytest.mark.parametrize("size", [0, 1, 4, 12, 24, 48, 255, 257, 512, -16])
def test_no_other_block_size_is_accepted(size: int) -> None:
    with pytest.raises(SettingsError, match=r"accepted: a power of two, 8 to 256$"):
        value_of("engine.kv_cache.block_size", size)


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("engine.max_num_seqs", True),
        ("engine.max_num_seqs", 3.0),
        ("engine.max_num_seqs", [3]),
        ("engine.prefix_cache.enabled", 2),
        ("engine.prefix_cache.enabled", 1.0),
        ("worker.lease_s", False),
        ("model.path", 3),
        ("log.level", 1),
        ("redis.url", 6379),
    ],
)
def test_a_typed_value_must_have_the_type_of_its_setting(key: str, raw: object) -> None:
    with pytest.raises(SettingsError, match=f"^--set {key}="):
        value_of(key, raw)


def test_typed_values_are_taken_as_they_are() -> None:
    assert value_of("engine.max_num_seqs", 3) == 3
    assert value_of("worker.lease_s", 60) == 60
    assert value_of("model.path", Path("models/a")) == "models/a"
    assert value_of("engine.prefix_cache.enabled", 0) is False


@given(st.integers(min_value=-(2**63), max_value=2**63))
def test_whole_numbers_survive_being_written_and_read(value: int) -> None:
    assert read_whole_number(write(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e15, max_value=1e15))
def test_numbers_survive_being_written_and_read(value: float) -> None:
    assert read_number(write(value)) == value


@given(st.text(max_size=8))
def test_any_text_is_a_boolean_of_the_grammar_or_refused(text: str) -> None:
    try:
        read = read_boolean(text)
    except ValueError:
        assert text.lower() not in {*TRUE_WORDS, *FALSE_WORDS}
    else:
        assert text.lower() in (TRUE_WORDS if read else FALSE_WORDS)


def test_sizes_are_whole_numbers_with_commas_between() -> None:
    graphs = load_settings({KEY: "1,2,48"}, environ={}).settings.engine.cuda_graphs
    assert (graphs.enabled, graphs.sizes) == (None, (1, 2, 48))
    assert load_settings({KEY: "none"}, environ={}).settings.engine.cuda_graphs.sizes is None


@pytest.mark.parametrize("text", ["0", "0,1", "2,1", "1,1", "1, 2", "1,", ",", "1;2", "01", "65537", "1.0", "all"])
def test_other_texts_are_refused_with_the_accepted_form(text: str) -> None:
    with pytest.raises(SettingsError, match=r"engine\.cuda_graphs\.batch_sizes=.*rising, with commas between: 1,2,4,8"):
        load_settings({KEY: text}, environ={})


def test_a_size_that_no_step_can_have_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"batch_sizes=1,65: accepted: at most engine\.max_num_seqs, which is 64"):
        load_settings({KEY: "1,65"}, environ={})
    assert load_settings({KEY: "1,65", "engine.max_num_seqs": "65"}, environ={}).settings.engine.max_num_seqs == 65


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "selected"), [(128, 4, True), (129, 4, False), (128, 3, False), (1, 5, True)]
)
def test_the_filters_bound_tokens_from_above_and_requests_from_below(
    num_tokens: int, num_seqs: int, selected: bool
) -> None:
    assert FILTERED.selects(0, num_tokens, num_seqs) is selected


def test_one_step_in_so_many_is_selected() -> None:
    profile = ProfileSettings(every_steps=9)

    assert [step for step in range(30) if profile.selects(step, 1, 1)] == [0, 9, 18, 27]


def test_absent_filters_select_everything() -> None:
    assert ProfileSettings(every_steps=1).selects(7, 1_000_000, 1)
