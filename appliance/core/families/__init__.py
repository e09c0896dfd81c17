"""The families of models that the embedded engine builds, and which model types of config.json belong to each."""

from __future__ import annotations

from collections.abc import Callable

from appliance.core.architecture import Architecture
from appliance.core.families import bert, decoders, images, rotary
from appliance.core.families.common import Config, architecture_name, unsupported

FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "bert": bert.bert,
    "roberta": bert.roberta,
    "xlm-roberta": rotary.xlm_roberta,
    "camembert": bert.roberta,
    "distilbert": bert.distilbert,
    "mpnet": bert.mpnet,
    "deberta-v2": bert.deberta,
    "modernbert": rotary.modernbert,
    "nomic_bert": rotary.nomic_bert,
    "new": rotary.gte,
    "gte": rotary.gte,
    "jina_embeddings_v3": rotary.jina_xlm_roberta,
    "qwen2": decoders.qwen2,
    "qwen3": decoders.qwen3,
    "mistral": decoders.mistral,
    "llama": decoders.llama,
    "eurobert": decoders.eurobert,
    "gemma3_text": decoders.gemma3,
    "model2vec": decoders.static,
    **dict.fromkeys(images.KINDS, images.texts),
}


HEADS = {  # by task
    "embedding": "hidden",
    "multivector": "hidden",
    "sparse": "sparse",
    "reranker": "scores",
    "classifier": "scores",
}


def architecture_of(config: Config, head: str = "hidden") -> Architecture:
    """config: of config.json; head: `hidden`, `sparse` or `scores`.

    Raises: Problem UNSUPPORTED_MODEL unless the engine can build the graph of such a model with this head.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise unsupported(f"{architecture_name(config)} (model type {kind})")
    try:
        architecture = FAMILIES[kind](config)
    except KeyError as missing:
        raise unsupported(f"{architecture_name(config)} without {missing} in its config.json") from missing
    if head == "sparse" and architecture.language_head is None:
        raise unsupported(f"sparse vectors with {architecture_name(config)}")
    if head == "scores" and architecture.score_head is None:
        raise unsupported(f"scores with {architecture_name(config)}")
    return architecture
