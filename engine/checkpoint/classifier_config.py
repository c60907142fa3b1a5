"""Reads which classes a model with a classification head tells apart, and how logits become what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
# vLLM's, the older one first: false joins the two texts without what the tokenizer puts between them.
PAIR_KEYS = ("use_pad_token", "use_sep_token")
_OLD_MODULE_KEY = "sbert_ce_default_activation_function"  # before sentence-transformers 4


@dataclass(frozen=True, slots=True)
class TokenLogit:
    """A class that is the logit of a token, less that of another one where there is one."""

    token_id: int
    less_id: int | None = None


@dataclass(frozen=True, slots=True)
class PairForm:
    """How two texts become one input.

    pair: as the tokenizer puts them together. joined: one behind the other, as one text. template: by the model's chat
    template, which has them from messages of the roles `query` and `document`. template or joined: so where the
    template names these roles.
    """

    kind: Literal["pair", "joined", "template", "template or joined"] = "pair"
    instruction: str | None = None  # what a template has from a message of the system's, before these; None: no message
    arguments: Mapping[str, object] = field(default_factory=dict)  # variables of the template
    takes_parts: bool = False  # the content of messages is a list of one part


AS_PAIR = PairForm()


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """The classes of a model's head, in the order of its logits."""

    labels: tuple[str, ...]  # one a class; at least one
    activation: ClassActivation  # of a text's logits
    pair_activation: ClassActivation  # of a pair's one logit, which makes it a score; of no use with several
    padding_id: int | None = None  # the token that a decoder's head looks past for a text's last one, as transformers'
    token_logits: tuple[TokenLogit, ...] = ()  # one a class; empty: the head has weights of its own
    pair_form: PairForm = AS_PAIR

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
        return cls(labels, activation, pair_activation, padding_id, pair_form=_pair_form(config))

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


def _pair_form(config: ConfigReader) -> PairForm:
    key = next((key for key in PAIR_KEYS if config.has(key)), None)
    return AS_PAIR if key is None or config.flag(key) else PairForm("joined")


def _pair_activation(config: ConfigReader) -> ClassActivation:
    own, key = config.table("sentence_transformers"), "activation_fn"
    if own is None or not own.has(key):
        own, key = config, _OLD_MODULE_KEY
    return named_activation(own, key) if own.has(key) else "sigmoid"


def named_activation(config: ConfigReader, key: str) -> ClassActivation:
    """The activation that a file of sentence-transformers names by its class. Raises CheckpointError."""
    module = config.data.get(key)
    name = module.rpartition(".")[2] if isinstance(module, str) else ""
    if name not in _BY_MODULE:
        raise config.refuse(key, module, "torch.nn.modules.linear.Identity or torch.nn.modules.activation.Sigmoid")
    return _BY_MODULE[name]
