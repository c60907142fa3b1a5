"""Makes tokenizers and chat templates for tests: 296 tokens of byte-level BPE in the files of a checkpoint, one of
SentencePiece's kind with byte tokens, and one whose tokens are bytes and that needs no file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.text.chat_template import ChatTemplate
from engine.text.inputs import EncodedInput, TextPair, TruncationSide

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"

# Each word becomes one token, built from merges of its letters left to right ("Ġ" is byte-level BPE's space).
WORDS = ("Ġthe", "Ġand", "Ġyou", "Ġare", "Ġa", "Ġis", "the", "you", "ing", "er", "system", "user", "assistant", "ĊĊ")

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

PIECES = ("▁", "▁the", "▁a", "a", "b", "th", "e", "▁b", "é", "▁é", ".", "▁▁", "\n", "x▁y")
SENTENCEPIECE_SPECIAL_TOKENS = ("<s>", "</s>")

# ChatML, functions in the system message, reasoning dropped from turns before the last question, a switch for thinking
# (what Qwen3's template does).
THINKING = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{% endmacro %}
{%- set start = namespace(text='', last=-1) %}
{%- if messages[0].role == 'system' %}{% set start.text = messages[0].content %}{% endif %}
{%- if tools %}
    {%- set start.text = start.text + '\\n\\n# Functions\\n<functions>' %}
    {%- for tool in tools %}{% set start.text = start.text ~ '\\n' ~ (tool | tojson) %}{% endfor %}
    {%- set start.text = start.text + '\\n</functions>' %}
{%- endif %}
{%- if start.text %}{{ turn('system', start.text.lstrip('\\n')) }}{% endif %}
{%- for message in messages[::-1] %}
    {%- if start.last < 0 and message.role == 'user' and message.content is string %}
        {%- set start.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- set position = messages.index(message) %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content | default('') %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if position > start.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '' if loop.first and not content else '\\n' }}
            {{- '<call>{"name": "' ~ function.name ~ '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<result>' + content + '</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- turn(message.role, content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Headers, a dated system message, functions inside the first question (what Llama 3's template does).
HEADERS = """\
{%- set head = '<|start_header_id|>{}<|end_header_id|>\\n\\n' %}
{{- bos_token + head.format('system') }}
{%- if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}
{{- 'Today: ' + date_string + '\\n\\n' }}
{#- Only the first message may be the system's. #}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if not messages %}{{ raise_exception('the functions need a question') }}{% endif %}
    {{- head.format('user') -}}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
    {{- messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head.format('assistant') + '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- head.format('ipython') }}
        {{- message.content | tojson if message.content is mapping or message.content is iterable else '' }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- head.format(message['role']) + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head.format('assistant') }}{% endif %}
"""

# Instruction brackets, strict alternation, end-of-sequence tokens, and blocks that need trim_blocks and lstrip_blocks
# (what Llama 2's and Mistral's do), with the loop controls and the generation block of newer templates.
BRACKETS = """\
{{ bos_token }}
{% for message in messages %}
    {% if message['role'] not in ['system', 'user', 'assistant'] %}
        {% continue %}
    {% endif %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate: ' ~ message['role']) }}
    {% endif %}
    {% if message['role'] == 'user' %}
[INST] {{ message['content'].strip() }} [/INST]
    {% else %}
        {% generation %}
{{ message['content'] + eos_token }}
        {% endgeneration %}
    {% endif %}
    {% if message.last %}{% break %}{% endif %}
{% endfor %}
{% set options = dict(answer=enable_answer | default(true), words=dict.fromkeys(['a', 'b'], 1)) %}
{{ options | tojson(sort_keys=true, separators=(',', ':')) }}
{% for key, value in (messages[0] | dictsort) %}{{ key }}={{ value | string | length }};{% endfor %}
"""

# Prints all that the template is given, so that no key is dropped or renamed unnoticed.
EVERYTHING = """\
{{ messages | tojson }}|{{ tools | tojson }}|{{ documents | tojson }}|{{ add_generation_prompt }}
{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}
{{- image_token }}|{{ extra | default(none) | tojson }}
"""


def make_tokenizer(path: Path) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json into the directory `path`; returns the tokenizer.

    Ids: 0..255 the bytes, then the merges, then SPECIAL_TOKENS in order. Any text encodes and decodes to itself.
    """
    tokenizer = build_tokenizer()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2), encoding="utf-8")
    return tokenizer


def build_tokenizer() -> Tokenizer:
    """The tokenizer in memory."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
    }


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
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SENTENCEPIECE_SPECIAL_TOKENS]
    )
    return tokenizer


class ByteTokenizer:
    """Stands in for engine.text.tokenizer.Tokenizer where only its methods for requests and records are called."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = None if chat_template is None else ChatTemplate({"default": chat_template}, {})
        self.truncation_side: TruncationSide = "right"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_inputs(self, texts: Sequence[str | TextPair], limits: Sequence[int | None]) -> list[EncodedInput]:
        cut = [self.encode("".join(text))[:limit] for text, limit in zip(texts, limits, strict=True)]
        return [EncodedInput(ids, len(ids)) for ids in cut]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])
