from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import decoders

from engine.errors import CheckpointError
from engine.text.detokenizer import TokenDecoder

LLAMA_2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def make(decoder: Any) -> TokenDecoder:
    return TokenDecoder(json.loads(decoder.__getstate__()))


def test_byte_level_tokens_stand_for_the_bytes_the_library_decodes_them_to() -> None:
    library = decoders.ByteLevel()
    decoder = make(library)
    for character in (chr(code) for code in range(0x400)):
        assert decoder.token_bytes(character).decode(errors="replace") == library.decode([character])
    assert decoder.token_bytes("Ġthe") == b" the"
    assert decoder.token_bytes("Ã©") == "é".encode()
    assert decoder.token_bytes("Ã") == b"\xc3"
    assert decoder.token_bytes("<|x y|>") == b"<|x y|>"


def test_every_byte_has_one_character() -> None:
    decoder = make(decoders.ByteLevel())
    single = [decoder.token_bytes(chr(code)) for code in range(0x180)]
    found = sorted(data[0] for data in single if len(data) == 1 and data >= b"\x80")
    assert set(found) == set(range(0x80, 0x100))


def test_byte_fallback_tokens_stand_for_one_byte() -> None:
    decoder = make(LLAMA_2)
    assert decoder.token_bytes("<0xE2>") == b"\xe2"
    assert decoder.token_bytes("<0xZZ>") == b"<0xZZ>"
    assert decoder.token_bytes("▁the▁") == b" the "
    assert decoder.is_byte_token("<0x0A>")
    assert not decoder.is_byte_token("▁<0x0A>")


def test_without_byte_fallback_nothing_is_a_byte_token() -> None:
    decoder = make(decoders.Metaspace())
    assert not decoder.is_byte_token("<0x0A>")
    assert decoder.token_bytes("<0x0A>") == b"<0x0A>"
    assert decoder.token_bytes("▁a") == b" a"


def test_no_decoder_leaves_tokens_as_they_are() -> None:
    assert TokenDecoder(None).token_bytes("Ġa") == "Ġa".encode()


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]), "ByteLevel"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "after Fuse"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]), "after Fuse"),
    ],
)
def test_a_decoder_that_could_change_earlier_text_is_refused(decoder: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        make(decoder)
    assert "tokenizer.json: decoder:" in str(caught.value)
