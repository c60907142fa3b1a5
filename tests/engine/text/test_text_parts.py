from __future__ import annotations

import pytest

from engine.text.chat_template import ChatTemplate

LOOP = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
EITHER = (
    "{% set c = messages[0].content %}"
    "{% if c is string %}{{ c }}{% else %}{{ c | map(attribute='text') | join }}{% endif %}"
)
SPECIAL = {"bos_token": "<b>"}


def takes_parts(source: str, *, with_tools: bool = False, **others: str) -> bool:
    return ChatTemplate({"default": source, **others}, SPECIAL).takes_parts(with_tools=with_tools)


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        EITHER,
        "{{ bos_token + 'x' }}" + LOOP,
        LOOP.replace("part.text", "part['text'] + '\\n'"),
        "{{ strftime_now('%Y') }}" + LOOP,
    ],
    ids=["loop", "either", "behind a special token", "lines", "behind a date"],
)
def test_a_template_that_writes_the_texts_takes_parts(source: str) -> None:
    assert takes_parts(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages | tojson }}",
        "{{ messages[0].content | trim }}",
        "{{ messages[0].content + '!' }}",
        "{{ messages[0].content if messages[0].content is string else '' }}",
        "{{ messages[0].content[0].text }}",
        "{{ raise_exception('never') }}",
        "",
    ],
)
def test_a_template_that_writes_the_list_or_nothing_wants_a_string(source: str) -> None:
    assert not takes_parts(source)


def test_each_of_a_models_templates_is_tried() -> None:
    assert takes_parts("{{ messages[0].content }}", with_tools=True, tool_use=LOOP)
    assert not takes_parts("{{ messages[0].content }}", with_tools=False, tool_use=LOOP)


def test_a_template_knows_the_roles_it_compares_with() -> None:
    template = ChatTemplate(
        {"default": "{% if messages[0].role in ['system', \"developer\"] %}{% endif %}assistant"}, {}
    )

    assert template.knows_role("developer", with_tools=False)
    assert not template.knows_role("tool", with_tools=False)


def test_a_template_writes_what_stands_in_its_text_or_strings_but_not_in_comments() -> None:
    template = ChatTemplate({"default": "{# never #}<one>{{ '<two>' }}", "tool_use": '{{ "\\"three\\"" }}'}, {})

    assert [template.writes(text) for text in ("<one>", "<two>", '"three"', "never")] == [True, True, True, False]
