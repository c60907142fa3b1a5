"""The sizes of decode graphs as they are written."""

from __future__ import annotations

import pytest

from settings import SettingsError, load_settings

KEY = "engine.cuda_graphs.batch_sizes"


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
