"""Reads which classes a model with a classification head tells apart, and how logits become what is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, cast

from engine.checkpoint.config_reader import ConfigReader

ClassActivation = Literal["sigmoid", "softmax", "none"]  # none: the logits themselves

# transformers' kinds of training; left out: by the number of classes.
_BY_PROBLEM: dict[str, ClassActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# The last part of the name that sentence-transformers writes, torch.nn.modules.linear.Identity: no name is imported.
_BY_MODULE: dict[str, ClassActivation] = {"Identity": "none", "Sigmoid": "sigmoid"}
# vLLM's: false joins the two texts without what the tokenizer puts between them, which nothing here does.
_PAIR_KEYS = ("use_sep_token", "use_pad_token")
_OLD_MODULE_KEY = "sbert_ce_default_activation_function"  # before sentence-transformers 4


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """The classes of a model's head, in the order of its logits."""

    labels: tuple[str, ...]  # one a class; at least one
    activation: ClassActivation  # of a text's logits
    pair_activation: ClassActivation  # of a pair's one logit, which makes it a score; of no use with several
    padding_id: int | None = None  # the token that a decoder's head looks past for a text's last one, as transformers'

    @classmethod
    def of(cls, config: ConfigReader, classifying_class: str) -> Self | None:
        """None where `architectures` names another class: the model has no such head. Raises CheckpointError."""
        return cls.from_reader(config) if config.data.get("architectures") == [classifying_class] else None

    @classmethod
    def from_reader(cls, config: ConfigReader) -> Self:
        """Read the keys, with the defaults of transformers and, for pairs, of sentence-transformers' CrossEncoder.

        Raises CheckpointError naming the key.
        """
        labels = _labels(config)
        by_number: ClassActivation = "sigmoid" if len(labels) == 1 else "softmax"
        activation = by_number
        if config.has("problem_type"):
            activation = _BY_PROBLEM[config.choice("problem_type", tuple(_BY_PROBLEM))]
        if activation == "softmax":
            activation = by_number  # a softmax over one class is 1 whatever its logit: vLLM's is a sigmoid, too
        pair_activation: ClassActivation = _pair_activation(config) if len(labels) == 1 else "sigmoid"
        padding_id = config.integer("pad_token_id", minimum=-1) if config.has("pad_token_id") else None
        return cls(labels, activation, pair_activation, padding_id)

    @property
    def scores_pairs(self) -> bool:
        """Whether its one logit says how well two texts go together. Of several classes none is the score."""
        return len(self.labels) == 1


def _labels(config: ConfigReader) -> tuple[str, ...]:
    """`id2label`, which is left out where there are two classes, else transformers' names."""
    table = config.table("id2label")
    if table is None:
        return tuple(f"LABEL_{index}" for index in range(config.integer("num_labels", default=2)))
    names = [table.data.get(str(index)) for index in range(len(table.data))]
    if not names or not all(isinstance(name, str) for name in names):
        raise config.refuse("id2label", dict(table.data), 'a name for each of "0", "1", ...')
    if config.integer("num_labels", default=len(names)) != len(names):
        raise config.refuse("num_labels", config.data["num_labels"], f"{len(names)}, as id2label has names")
    return tuple(cast(list[str], names))


def _pair_activation(config: ConfigReader) -> ClassActivation:
    for key in _PAIR_KEYS:
        if not config.flag(key, default=True):
            raise config.refuse(key, False, "true")
    own, key = config.table("sentence_transformers"), "activation_fn"
    if own is None or not own.has(key):
        own, key = config, _OLD_MODULE_KEY
    if not own.has(key):
        return "sigmoid"
    module = own.data[key]
    name = module.rpartition(".")[2] if isinstance(module, str) else ""
    if name not in _BY_MODULE:
        raise own.refuse(key, module, "torch.nn.modules.linear.Identity or torch.nn.modules.activation.Sigmoid")
    return _BY_MODULE[name]
