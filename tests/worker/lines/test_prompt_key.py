from __future__ import annotations

from tests.support.request_lines import completion_line, parse, raw_line


def key(raw: bytes) -> str:
    return parse(raw).prompt_key()


def test_prompts_with_a_common_beginning_sort_together() -> None:
    texts = ["shared one", "other", "shared two", "a", "shared"]

    ordered = sorted(texts, key=lambda text: key(raw_line({"prompt": text})))

    assert ordered == ["a", "other", "shared", "shared one", "shared two"]


def test_token_prompts_sort_by_token_id() -> None:
    prompts = [[300], [4, 5], [4], [5], [4, 300]]

    ordered = sorted(prompts, key=lambda prompt: key(raw_line({"prompt": prompt})))

    assert ordered == [[4], [4, 5], [4, 300], [5], [300]]


def test_conversations_share_the_key_of_their_common_messages() -> None:
    system = {"role": "system", "content": "be brief"}
    first = key(raw_line({"messages": [system, {"role": "user", "content": "a"}]}))
    second = key(raw_line({"messages": [system, {"role": "user", "content": "b"}]}))

    assert first[:-2] == second[:-2]
    assert first != second


def test_roles_and_message_bounds_are_part_of_the_key() -> None:
    one = key(raw_line({"messages": [{"role": "user", "content": "ab"}]}))
    two = key(raw_line({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}))
    other_role = key(raw_line({"messages": [{"role": "assistant", "content": "ab"}]}))

    assert len({one, two, other_role}) == 3


def test_sampling_parameters_are_not_part_of_the_key() -> None:
    assert key(completion_line(temperature=0.5, custom_id="x")) == key(completion_line())
