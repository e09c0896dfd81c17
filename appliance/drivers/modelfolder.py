"""Reads a model folder: what the model does, how it pools, how long its inputs may be. The rules are TEI's (1.9).

What TEI has not: models of token vectors (`core/multivector`), BGE-M3's two further heads, and language models that
are asked whether a document answers a query.

The task: a `...ForMaskedLM` with pooling `splade` is sparse; a name that ends in `Classification` is a reranker with
one label and a classifier with more; every other model embeds. It pools as the flag says; without a flag, as 1_Pooling
says; without both, by the first token if the model type contains "bert".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from appliance.core import multivector, preprocessing, sentence_modules
from appliance.core.families import images
from appliance.core.families.common import first_position
from appliance.core.multivector import Multivector
from appliance.core.preprocessing import Preprocessing
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.files import jsonfile
from appliance.files.opening import open_regular

LONGEST_TEMPLATE = 1024 * 1024
ROBERTA_LIKE = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "jina_embeddings_v3",
)  # positions begin after the padding index
STATIC = "model2vec"  # a table of vectors: it wants the tokens of the text alone
POSITIONS = ("max_position_embeddings", "n_positions", "seq_length")  # of most, of NomicBERT, of model2vec
LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
POOLING_FLAGS = (
    ("cls", "pooling_mode_cls_token"),
    ("mean", "pooling_mode_mean_tokens"),
    ("last-token", "pooling_mode_lasttoken"),
)


@dataclass(frozen=True)
class DenseModule:
    """One `Dense` module after pooling: a linear layer and its activation (`Tanh` or `Identity`). residual: its input
    is added to what comes out."""

    folder: Path
    activation: str
    bias: bool
    residual: bool = False


POOLINGS = {"sparse": "splade", "multivector": "none"}
SPARSE_HEAD, TOKEN_HEAD = "sparse_linear.pt", "colbert_linear.pt"  # of BGE-M3


@dataclass(frozen=True)
class Card:
    """What a folder says of its model. task: embedding, sparse, multivector, classifier, reranker.

    max_tokens: with special ones; multivector: how a model of this task treats its texts; chat_template: how a pair
    becomes the text of a language model, with its instruction; images: how an image becomes what the model takes.
    """

    folder: Path
    config: dict[str, Any]
    task: str
    pooling: str
    max_tokens: int
    labels: tuple[str, ...]
    prompts: dict[str, str]
    dense: tuple[DenseModule, ...]
    multivector: Multivector | None = None
    chat_template: str | None = None
    instruction: str | None = None
    images: Preprocessing | None = None

    @cached_property
    def has_all_heads(self) -> bool:
        """Whether one pass gives dense, sparse and token vectors. It is looked at once: each text asks."""
        return self.task == "embedding" and all((self.folder / name).exists() for name in (SPARSE_HEAD, TOKEN_HEAD))

    @cached_property
    def tasks(self) -> frozenset[str]:
        """All that the model does."""
        return frozenset({self.task, "sparse", "multivector"} if self.has_all_heads else {self.task})

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or ["?"])[0])

    @property
    def pad_id(self) -> int:
        return int(self.config.get("pad_token_id") or 0)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters of which each text may choose one; each is the name of a prompt, too."""
        return tuple(self.config.get("lora_adaptations") or ())

    @property
    def special_tokens(self) -> bool:
        """Whether the tokenizer's marks (of beginning, end, separation) belong to what the model sees."""
        return self.model_type != STATIC

    @property
    def has_token_types(self) -> bool:
        """Whether the model distinguishes token types other than 0."""
        return int(self.config.get("type_vocab_size", 1)) > 1


def read_card(folder: Path, pooling: str | None = None) -> Card:
    """Read a folder. pooling: the flag, if there is one. Raises: Problem that names the file or key at fault."""
    try:
        return card_of(folder, pooling)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise invalid(f"{folder} has a configuration of the wrong shape: {type(error).__name__}: {error}") from error


def card_of(folder: Path, pooling: str | None) -> Card:
    config = read_json(folder / "config.json")
    if config is None:
        raise invalid(f"{folder} has no config.json: it is not a model folder")
    for key in ("architectures", "model_type"):
        if not config.get(key):
            raise invalid(f'{folder / "config.json"} has no "{key}"')
    takes_images = images.takes_images(config)
    modules = read_json(folder / "modules.json") or []
    sentence_modules.refuse_unknown(str(folder / "modules.json"), modules)
    for module in modules:
        if str(module["type"]).endswith(".SpladePooling"):
            refuse_other_splade(folder / module["path"] / "config.json")
    model = read_json(folder / "config_sentence_transformers.json") or {}
    tokens = multivector_of(folder, config, modules, model)
    prompts, template = prompts_of(config, model), None
    task, labels = task_of(config, pooling)
    if tokens:
        task, prompts = "multivector", dict(tokens.prompts)
    elif judge := next((module for module in modules if module["type"].endswith(".LogitScore")), None):
        config = {**config, **(read_json(folder / judge["path"] / "config.json") or {})}
        task, labels, template = "reranker", ("LABEL_0",), chat_template_of(folder)
    chosen = POOLINGS.get(task, "cls")
    if task == "embedding":
        chosen = pooling_of(folder / sentence_modules.pooling_folder(modules), config, pooling, prompts)
    if "message" in (transformer_config(folder).get("modality_config") or {}) and template is None and not tokens:
        words = f"{folder} has its texts put into a chat template by sentence-transformers, which is not done here"
        raise Problem(Kind.INVALID, "UNSUPPORTED_MODEL", words)
    return Card(
        folder=folder,
        config=config,
        task=task,
        pooling=chosen,
        max_tokens=max_tokens(folder, config, tokens.lengths.values() if tokens else ()),
        labels=labels,
        prompts=prompts,
        dense=tuple(dense_of(folder, module) for module in modules if module["type"].endswith(".Dense")),
        multivector=tokens,
        chat_template=template,
        instruction=prompts.get(model.get("default_prompt_name") or "") if template else None,
        images=preprocessing.parse(preprocessor_config(folder)) if takes_images else None,
    )


def preprocessor_config(folder: Path) -> dict[str, Any]:
    """How an image becomes what the model takes; transformers 5 keeps it with the rest of its processor."""
    own: dict[str, Any] | None = read_json(folder / "preprocessor_config.json")
    whole = read_json(folder / "processor_config.json") or {}
    config = own or whole.get("image_processor")
    if not config:
        raise invalid(
            f"{folder} has neither preprocessor_config.json nor processor_config.json with an image_processor"
        )
    return config


def refuse_other_splade(file: Path) -> None:
    """Raises: Problem for another pooling than the usual one, log(1 + ReLU) of the largest."""
    config = read_json(file) or {}
    for key, usual in (("pooling_strategy", "max"), ("activation_function", "relu")):
        if config.get(key, usual) != usual:
            words = f"{file} has {key} {quoted(str(config[key]))}; only {usual} is computed"
            raise Problem(Kind.INVALID, "UNSUPPORTED_MODEL", words)


def prompts_of(config: dict[str, Any], model: dict[str, Any]) -> dict[str, str]:
    """Those of sentence-transformers, and one for each adapter, which may be empty."""
    instructions = config.get("task_instructions") or {}
    adapters = {name: str(instructions.get(name) or "") for name in config.get("lora_adaptations") or ()}
    return {**adapters, **(model.get("prompts") or {})}


def multivector_of(
    folder: Path, config: dict[str, Any], modules: list[dict[str, Any]], model: dict[str, Any]
) -> Multivector | None:
    """How a model of token vectors treats its texts; None for every other model."""
    if "HF_ColBERT" in config["architectures"]:
        return multivector.of_stanford(read_json(folder / "artifact.metadata") or {})
    if model.get("model_type") == "ColBERT" or any(module["type"].startswith("pylate.") for module in modules):
        return multivector.of_pylate(model)
    mask = next((module for module in modules if module["type"].endswith(".MultiVectorMask")), None)
    if mask is None:
        return None
    normalize = any(module["type"].endswith(".Normalize") for module in modules)
    return multivector.of_modules(
        model, transformer_config(folder), read_json(folder / mask["path"] / "config.json") or {}, normalize
    )


def chat_template_of(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    try:
        with open_regular(file) as opened:
            return opened.read(LONGEST_TEMPLATE).decode("utf-8")
    except FileNotFoundError:
        pass  # it is among the settings of the tokenizer
    except (OSError, ValueError) as error:
        raise invalid(f"{file} cannot be read: {error}") from error
    template = (read_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    if not isinstance(template, str):
        raise invalid(f"{folder} has no chat template, so it cannot be asked how well a document answers a query")
    return template


def transformer_config(folder: Path) -> dict[str, Any]:
    """What sentence-transformers keeps of its first module."""
    configs = (read_json(folder / name) for name in LENGTH_FILES)
    return next((config for config in configs if config), {})


def read_json(path: Path) -> Any:
    """The parsed file; None when there is none. Raises: Problem."""
    try:
        return jsonfile.read_json(path)
    except ValueError as error:
        raise invalid(f"{path} {error}") from error


def task_of(config: dict[str, Any], pooling: str | None) -> tuple[str, tuple[str, ...]]:
    for architecture in config["architectures"]:
        if architecture.endswith("MaskedLM") and pooling == "splade":
            return "sparse", ()
        if architecture.endswith("TokenClassification"):
            continue  # gte-multilingual names one beside what it is
        if architecture.endswith("Classification"):
            labels = labels_of(config)
            return ("reranker" if len(labels) == 1 else "classifier"), labels
    if all(architecture.endswith("TokenClassification") for architecture in config["architectures"]):
        words = f"{config['architectures'][0]} has labels for tokens; only those for whole texts are computed"
        raise Problem(Kind.INVALID, "UNSUPPORTED_MODEL", words)
    if pooling == "splade":
        raise invalid(f"Pooling splade needs a ...ForMaskedLM model, not {config['architectures'][0]}")
    return "embedding", ()


def labels_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Labels in the order of their numbers, which must run from 0 without gaps (TEI aborts on gaps)."""
    labels = {int(key): str(value) for key, value in (config.get("id2label") or {}).items()}
    if not labels or sorted(labels) != list(range(len(labels))):
        raise invalid('config.json needs "id2label" with the numbers 0, 1, 2, ... for a classification model')
    return tuple(labels[index] for index in range(len(labels)))


def pooling_of(folder: Path, config: dict[str, Any], asked: str | None, prompts: dict[str, str]) -> str:
    if asked:
        return asked
    file = folder / "config.json"
    pooling = read_json(file)
    if config["model_type"] == STATIC:
        return "mean"
    if images.takes_images(config):
        return "last-token"
    if pooling is None:
        if "bert" in config["model_type"]:
            return "cls"
        raise invalid(
            f"{folder.parent} has no {folder.name}/config.json: choose one with --pooling cls, mean or last-token"
        )
    if pooling.get("include_prompt") is False and any(prompts.values()):
        raise invalid(
            f"{file} leaves prompts out of the pooling, which is not supported: choose one with --pooling cls or mean, "
            "and their tokens count"
        )
    mode = str(pooling.get("pooling_mode", "")).replace("lasttoken", "last-token")
    if mode in dict(POOLING_FLAGS):
        return mode
    wanted = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    chosen = next((mode for mode, key in POOLING_FLAGS if wanted == [key]), None)
    if chosen is None:
        raise invalid(
            f"{file} asks for a pooling that is not supported ({', '.join(wanted) or 'none'}): "
            "choose one with --pooling cls or mean"
        )
    return chosen


def max_tokens(folder: Path, config: dict[str, Any], more: Iterable[int] = ()) -> int:
    """The positions that the model has, or the limit in a config of sentence-transformers if that is lower.

    more: limits for texts of one purpose, which may be higher than that for all.
    """
    if images.takes_images(config):
        return images.text_positions(config)
    offset = first_position(config) if config["model_type"] in ROBERTA_LIKE else 0
    positions = next((config[key] for key in POSITIONS if config.get(key)), None)
    if not isinstance(positions, int):
        raise invalid(f'{folder / "config.json"} has no "max_position_embeddings"')
    return min(positions - offset, max([library_limit(folder) or positions, *more]))


def library_limit(folder: Path) -> int | None:
    """The limit of sentence-transformers. Where its own file does not say it (6.0), it is that of the tokenizer."""
    own = transformer_config(folder)
    limit = own.get("max_seq_length")
    if limit is None and own:
        limit = (read_json(folder / "tokenizer_config.json") or {}).get("model_max_length")
    return limit if isinstance(limit, int) and limit > 0 else None


def dense_of(folder: Path, module: dict[str, Any]) -> DenseModule:
    path = folder / module["path"]
    config = read_json(path / "config.json") or {}
    activation = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    if activation not in ("Tanh", "Identity"):
        raise Problem(
            Kind.INVALID, "UNSUPPORTED_MODEL", f"{path} has the activation {quoted(activation)}; Tanh and Identity work"
        )
    return DenseModule(path, activation, bool(config.get("bias", True)), bool(config.get("use_residual")))
