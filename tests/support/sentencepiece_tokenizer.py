"""A tokenizer of the SentencePiece kind (Llama 2), with byte tokens, for decoders that strip a leading space."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

PIECES = ("▁", "▁the", "▁a", "a", "b", "th", "e", "▁b", "é", "▁é", ".", "▁▁", "\n", "x▁y")
SPECIAL_TOKENS = ("<s>", "</s>")


def build_sentencepiece_tokenizer(*, metaspace: bool = False) -> Tokenizer:
    """Pieces, then (unless `metaspace`) the 256 byte tokens, then the special tokens."""
    tokens = [*PIECES, *(() if metaspace else (f"<0x{byte:02X}>" for byte in range(256)))]
    vocab = {"<unk>": 0} | {token: index for index, token in enumerate(tokens, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=not metaspace))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer
