from __future__ import annotations

import pytest

from worker.registry.errors import InvalidJobId
from worker.registry.keys import Keys, UnitRef
from worker.registry.queues import lanes_by_priority


def test_new_ids_are_valid_distinct_and_sort_by_time() -> None:
    keys = Keys()
    ids = [keys.new_job_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert all(keys.check_job_id(job_id) == job_id for job_id in ids)
    assert ids[0][:15] <= ids[-1][:15]
    assert ids[0][17] == "7"  # s0-xxxxxxxx-xxxx-7...: a version 7 UUID


@pytest.mark.parametrize(
    "job_id",
    [
        "",
        "s0",
        "s1-" + "0" * 36,
        "s0-" + "0" * 35,
        "s0-" + "0" * 36 + "\n",
        "s0-" + "g" * 36,
        "s0-*" + "0" * 35,
        None,
        7,
    ],
)
def test_what_is_no_job_id_names_no_key(job_id: object) -> None:
    with pytest.raises(InvalidJobId, match="accepted"):
        Keys().check_job_id(job_id)


@pytest.mark.parametrize("unit", ["", "-1", "1:x", "plans", "*", "1" * 10])
def test_what_is_no_unit_names_no_key(unit: str) -> None:
    keys = Keys()
    with pytest.raises(InvalidJobId, match="accepted: plan or a number"):
        keys.unit(UnitRef(keys.new_job_id(), unit))


def test_every_key_of_a_job_lies_in_one_hash_slot() -> None:
    keys = Keys()
    names = keys.of_unit_scripts(UnitRef.shard(keys.new_job_id(), 3))
    names += [keys.jobs, keys.idempotency("t", "k\ud800"), keys.tenant_admission("t")]
    assert all(name.startswith("millrace:{s0}:") for name in names)


def test_members_of_the_open_set_name_their_unit() -> None:
    ref = UnitRef.shard("s0-" + "0" * 36, 12)
    assert UnitRef.of_member(str(ref)) == ref


def test_ten_priorities_share_four_lanes() -> None:
    lanes = lanes_by_priority()
    assert len(lanes) == 10
    assert len(set(lanes)) == 4
    assert lanes[0] == lanes[2] == "millrace"
    assert lanes[9] == "millrace\x06\x169"
