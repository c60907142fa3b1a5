"""Reads how a decoder that answers with a token (Qwen3-Reranker's yes or no) scores pairs: by the logits of which
tokens, and of what prompt.

Two layouts say it: sentence-transformers' LogitScore module, and the keys of config.json that vLLM is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tokenizers

from engine.checkpoint.classifier_config import PAIR_KEYS, ClassifierConfig, PairForm, TokenLogit, named_activation
from engine.checkpoint.config_reader import MAX_CONFIG_BYTES, ConfigReader, check_size, read_json_object
from engine.checkpoint.files import MAX_TOKENIZER_BYTES, MODULES_FILE, TOKENIZER_FILE, read_modules
from engine.errors import CheckpointError

SENTENCE_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"

_TOKENS_KEY, _METHOD_KEY, _QWEN_KEY = "classifier_from_token", "method", "is_original_qwen3_reranker"
_METHODS = ("from_2_way_softmax", "no_post_processing")
# What `apply_chat_template` makes of these is no matter of a template, or decided here.
_NOT_OF_TEMPLATES = (
    *("messages", "tools", "documents", "chat_template", "tokenize", "return_dict", "return_tensors", "strftime_now"),
    *("padding", "truncation", "max_length", "continue_final_message", "return_assistant_tokens_mask"),
)


def with_saved_activation(path: Path, classifier: ClassifierConfig | None) -> ClassifierConfig | None:
    """The classifier, its pairs' activation as sentence-transformers has saved it beside config.json since 5.4.

    Raises CheckpointError for another activation than the two that config.json may name.
    """
    saved = _saved(path)
    if classifier is None or not classifier.scores_pairs or not saved.has("activation_fn"):
        return classifier
    return replace(classifier, pair_activation=named_activation(saved, "activation_fn"))


def read_token_scores(path: Path, config: ConfigReader) -> ClassifierConfig | None:
    """The classes that are made of tokens' logits; None where neither layout says that there are any.

    config: of config.json. Raises CheckpointError naming file and key.
    """
    modules = read_modules(path)
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if "LogitScore" in kinds:
        if kinds != ["Transformer", "LogitScore"]:
            raise CheckpointError(f"{path / MODULES_FILE}: modules are {kinds}; accepted: Transformer, then LogitScore")
        return _of_module(path, config, path / str(modules[1].get("path")) / "config.json")
    if config.has(_TOKENS_KEY) or (config.has(_QWEN_KEY) and config.flag(_QWEN_KEY)):
        return _of_keys(path, config)
    return None


def _of_module(path: Path, config: ConfigReader, file: Path) -> ClassifierConfig:
    if not file.resolve().is_relative_to(path.resolve()):
        raise CheckpointError(f"{path / MODULES_FILE}: leads to {file}; accepted: a folder of this directory")
    module = ConfigReader(read_json_object(file, max_bytes=MAX_CONFIG_BYTES), f"{file.parent.name}/config.json")
    module.choice("module_input_name", ("causal_logits",), default="causal_logits")
    less = _token_id(module, "false_token_id", config) if module.has("false_token_id") else None
    logit = TokenLogit(_token_id(module, "true_token_id", config), less)
    return _classifier(config, (logit,), _form_of_module(path))


def _token_id(module: ConfigReader, key: str, config: ConfigReader) -> int:
    token_id, vocab_size = module.integer(key, minimum=0), config.integer("vocab_size")
    if token_id >= vocab_size:
        raise module.refuse(key, token_id, f"a token of the model, 0 to {vocab_size - 1}")
    return token_id


def _form_of_module(path: Path) -> PairForm:
    """Without `modality_config` pairs go through the chat template, as where it has an entry for messages."""
    file = path / TRANSFORMER_FILE
    data = read_json_object(file, max_bytes=MAX_CONFIG_BYTES) if file.exists() else {}
    config = ConfigReader(data, TRANSFORMER_FILE)
    config.choice("transformer_task", ("text-generation",))
    if config.flag("do_lower_case", default=False):
        raise config.refuse("do_lower_case", True, "false: a text is lower-cased by its tokenizer only")
    modalities, takes_parts = config.table("modality_config"), False
    if modalities is not None:
        messages = modalities.table("message")
        if messages is None:
            return PairForm("pair")
        takes_parts = messages.choice("format", ("flat", "structured")) == "structured"
    return PairForm("template", _instruction(path), _template_arguments(config), takes_parts)


def _instruction(path: Path) -> str | None:
    """The prompt that every pair gets unless asked otherwise, which a template has from a message of the system's."""
    saved = _saved(path)
    if not saved.has("default_prompt_name"):
        return None
    prompts, name = saved.table("prompts"), saved.data["default_prompt_name"]
    found = None if prompts is None or not isinstance(name, str) else prompts.data.get(name)
    if not isinstance(found, str):
        raise saved.refuse("default_prompt_name", name, "the name of one of its prompts")
    return found


def _template_arguments(config: ConfigReader) -> Mapping[str, object]:
    processing = config.table("processing_kwargs")
    if processing is None:
        return {}
    for name, value in processing.data.items():
        if name != "chat_template" and value:
            raise processing.refuse(name, value, "chat_template only")
    arguments = processing.table("chat_template")
    if arguments is None:
        return {}
    arguments.flag("add_generation_prompt", default=False)
    if not arguments.flag("restore_suffix", default=True):
        raise arguments.refuse("restore_suffix", False, "true: what a template writes behind a document is never cut")
    for name in _NOT_OF_TEMPLATES:
        if arguments.has(name):
            raise arguments.refuse(name, arguments.data[name], "variables that the template itself reads")
    return {name: value for name, value in arguments.data.items() if name != "restore_suffix"}


def _of_keys(path: Path, config: ConfigReader) -> ClassifierConfig:
    """vLLM's: tokens by their spelling in the vocabulary; of two for one score, the first one's logit is subtracted."""
    names = config.data.get(_TOKENS_KEY)
    is_pair = config.has(_QWEN_KEY) and config.flag(_QWEN_KEY)
    if not is_pair:
        is_pair = config.choice(_METHOD_KEY, _METHODS) == _METHODS[0]
    if not isinstance(names, list) or not names or (is_pair and len(names) != 2):
        raise config.refuse(_TOKENS_KEY, names, "two tokens, that for no first" if is_pair else "a list of tokens")
    file = path / TOKENIZER_FILE
    check_size(file, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file}: not a valid tokenizer: {error}") from error
    ids = [tokenizer.token_to_id(name) if isinstance(name, str) else None for name in names]
    found = [token_id for token_id in ids if token_id is not None and token_id < config.integer("vocab_size")]
    if len(found) != len(names):
        raise config.refuse(_TOKENS_KEY, names, f"tokens of {TOKENIZER_FILE}, spelled as in its vocabulary")
    logits = (TokenLogit(found[1], found[0]),) if is_pair else tuple(map(TokenLogit, found))
    joins = not config.flag(next((key for key in PAIR_KEYS if config.has(key)), PAIR_KEYS[-1]), default=False)
    return _classifier(config, logits, PairForm("template or joined" if joins else "pair"))


def _classifier(config: ConfigReader, logits: tuple[TokenLogit, ...], form: PairForm) -> ClassifierConfig:
    """The file's labels are taken where it has as many; those of a model that generates are two by default."""
    labels = config.data.get("id2label")
    has_labels = isinstance(labels, Mapping) and len(labels) == len(logits)
    given = {**config.data, "num_labels": len(logits), "id2label": labels if has_labels else None}
    read = ClassifierConfig.from_reader(ConfigReader(given, config.source))
    return replace(read, padding_id=None, token_logits=logits, pair_form=form)


def _saved(path: Path) -> ConfigReader:
    file = path / SENTENCE_FILE
    return ConfigReader(read_json_object(file, max_bytes=MAX_CONFIG_BYTES) if file.exists() else {}, SENTENCE_FILE)
