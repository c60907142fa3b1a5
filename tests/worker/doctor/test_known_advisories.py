from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from worker.doctor.server import LISTED_ON, REDIS, VALKEY, Advisory

LUA_2025 = "CVE-2025-49844"


def cves(table: Sequence[Advisory], number: tuple[int, int, int]) -> set[str]:
    return {cve for advisory in table if advisory.affects(number) for cve in advisory.cves}


@pytest.mark.parametrize(
    "fixed", [(6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)], ids=lambda number: ".".join(map(str, number))
)
def test_a_hole_is_closed_in_the_very_version_that_closed_it(fixed: tuple[int, int, int]) -> None:
    before = (fixed[0], fixed[1], fixed[2] - 1)

    assert LUA_2025 in cves(REDIS, before)
    assert LUA_2025 not in cves(REDIS, fixed)


def test_a_series_that_got_no_fix_keeps_the_hole() -> None:
    assert LUA_2025 in cves(REDIS, (7, 0, 15))  # which Debian mends under this very number
    assert "CVE-2026-81934" in cves(REDIS, (8, 0, 6))


def test_what_came_with_a_series_is_not_held_against_older_ones() -> None:
    assert "CVE-2026-23631" not in cves(REDIS, (6, 2, 0))
    assert "CVE-2026-23631" in cves(REDIS, (7, 0, 0))


@pytest.mark.parametrize("number", [(6, 2, 24), (7, 2, 16), (7, 4, 11), (8, 2, 9), (8, 8, 2), (8, 10, 1), (9, 0, 0)])
def test_the_last_versions_have_no_known_hole(number: tuple[int, int, int]) -> None:
    assert cves(REDIS, number) == set()


@pytest.mark.parametrize("number", [(7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1)])
def test_nor_have_valkeys(number: tuple[int, int, int]) -> None:
    assert cves(VALKEY, number) == set()


def test_valkey_goes_by_versions_of_its_own() -> None:
    assert LUA_2025 in cves(VALKEY, (8, 1, 3))
    assert LUA_2025 not in cves(VALKEY, (8, 1, 4))


@pytest.mark.parametrize("table", [REDIS, VALKEY], ids=["Redis", "Valkey"])
def test_the_list_is_in_the_order_of_its_dates_and_each_series_moves_on(table: Sequence[Advisory]) -> None:
    dates = [advisory.published for advisory in table]
    assert dates == sorted(dates)
    assert max(dates) <= LISTED_ON
    last: dict[tuple[int, int], int] = {}
    for advisory in table:
        assert all(re.fullmatch(r"CVE-20\d\d-\d{4,6}", cve) for cve in advisory.cves)
        for series, patch in advisory.fixed.items():
            assert patch >= last.get(series, 0), advisory
            last[series] = patch
