"""Write tests/data/families/: one small model with random weights for each family and head, and what transformers says.

Each folder is a complete model (config.json, tokenizer.json, model.safetensors) with `expected.json`: the inputs and
the reference library's own numbers. Run once (the numbers in the tree: transformers 5.23, torch 2.13.0, CPU):
    pip install torch==2.13.0 sentence-transformers==6.2.0
    python scripts/reference_families.py [NAME ...]
"""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as tm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from testing.texts import mixed_texts  # noqa: E402

TARGET = ROOT / "tests" / "data" / "families"
VOCABULARY = 300
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
DISTIL = dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64)
TEXTS = [text[:200] for text in mixed_texts(40, seed=11)][:8] + ["a", "Straße 東京 🚀 tab\tand  spaces"]
PAIRS = [(TEXTS[8], text) for text in TEXTS[:5]]


def wordpiece(cls: str, sep: str, pad: str, unk: str, first: list[str]) -> Tokenizer:
    """BERT's, DistilBERT's and MPNet's kind: lower case, word pieces, token types."""
    tokenizer = Tokenizer(tm.WordPiece(unk_token=unk))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(mixed_texts(200, seed=3), trainer)
    ids = [(cls, tokenizer.token_to_id(cls)), (sep, tokenizer.token_to_id(sep))]
    middle = f"{sep}:0" if cls == "[CLS]" else f"{sep}:0 {sep}:0"  # MPNet joins a pair as RoBERTa does
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {middle} $B:{int(cls == '[CLS]')} {sep}:{int(cls == '[CLS]')}",
        special_tokens=ids,
    )
    return tokenizer


def byte_bpe() -> Tokenizer:
    """RoBERTa's kind: bytes, merges, <s> a </s></s> b </s>."""
    tokenizer = Tokenizer(tm.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + 100,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(mixed_texts(200, seed=3), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def unigram() -> Tokenizer:
    """XLM-RoBERTa's and CamemBERT's kind: sentence pieces with the blank as part of the word."""
    tokenizer = Tokenizer(tm.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(mixed_texts(200, seed=3), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def bert_tokens() -> Tokenizer:
    return wordpiece("[CLS]", "[SEP]", "[PAD]", "[UNK]", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])


def mpnet_tokens() -> Tokenizer:
    return wordpiece("<s>", "</s>", "<pad>", "[UNK]", ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"])


def decoder_tokens() -> Tokenizer:
    """Qwen's kind: bytes, merges, and an end of text that the tokenizer itself appends."""
    tokenizer = byte_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 2)]
    )
    return tokenizer


BERT = dict(pad_token_id=0, max_position_embeddings=64, type_vocab_size=2, **SIZES)
ROBERTA = dict(pad_token_id=1, max_position_embeddings=66, type_vocab_size=1, **SIZES)
# Positions beyond the buckets, so that the logarithmic ones count.
DEBERTA = dict(
    pad_token_id=0,
    max_position_embeddings=64,
    type_vocab_size=0,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=16,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    position_biased_input=False,
    pooler_hidden_size=32,
    **SIZES,
)
OLD_DEBERTA = dict(
    type_vocab_size=2, share_att_key=False, position_buckets=-1, norm_rel_ebd="none", position_biased_input=True
)
# Four layers: the first and the last see all, the others seven tokens to either side.
MODERNBERT = dict(
    pad_token_id=0,
    cls_token_id=2,
    sep_token_id=3,
    bos_token_id=2,
    eos_token_id=3,
    max_position_embeddings=64,
    local_attention=14,
    **{**SIZES, "num_hidden_layers": 4},
)
ROTARY = dict(pad_token_id=1, max_position_embeddings=64, **SIZES)
DECODER = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, max_position_embeddings=64, **SIZES)
GEMMA = dict(
    **{**DECODER, "num_hidden_layers": 3},
    num_key_value_heads=2,
    head_dim=16,
    query_pre_attn_scalar=24,
    use_bidirectional_attention=True,
    sliding_window=14,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
FAMILIES: dict[str, tuple[Any, Callable[[], Tokenizer], dict[str, Any]]] = {
    "bert": (tf.BertConfig, bert_tokens, BERT),
    "roberta": (tf.RobertaConfig, byte_bpe, ROBERTA),
    "xlm-roberta": (tf.XLMRobertaConfig, unigram, ROBERTA),
    "camembert": (tf.CamembertConfig, unigram, ROBERTA),
    "distilbert": (tf.DistilBertConfig, bert_tokens, dict(pad_token_id=0, max_position_embeddings=64, **DISTIL)),
    "mpnet": (tf.MPNetConfig, mpnet_tokens, dict(pad_token_id=1, max_position_embeddings=66, **SIZES)),
    "deberta-v3": (tf.DebertaV2Config, bert_tokens, DEBERTA),
    "deberta-v2": (tf.DebertaV2Config, bert_tokens, {**DEBERTA, **OLD_DEBERTA}),
    "deberta-v2-conv": (tf.DebertaV2Config, bert_tokens, {**DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "modernbert": (tf.ModernBertConfig, bert_tokens, MODERNBERT),
    "nomic": (
        tf.NomicBertConfig,
        bert_tokens,
        dict(**BERT, rope_parameters=dict(rope_type="default", rope_theta=1000)),
    ),
    "gte": (tf.GteConfig, unigram, dict(**ROTARY, type_vocab_size=1)),
    "gte-untyped": (tf.GteConfig, bert_tokens, {**ROTARY, "pad_token_id": 0, "type_vocab_size": 0}),
    "jina-v3": (tf.JinaEmbeddingsV3Config, unigram, ROBERTA),
    "qwen2": (tf.Qwen2Config, decoder_tokens, dict(**DECODER, num_key_value_heads=2)),
    "qwen3": (tf.Qwen3Config, decoder_tokens, dict(**DECODER, num_key_value_heads=2, head_dim=16)),
    "mistral": (tf.MistralConfig, decoder_tokens, dict(**DECODER, num_key_value_heads=1, sliding_window=12)),
    "llama": (tf.LlamaConfig, decoder_tokens, dict(**DECODER, num_key_value_heads=4)),
    "eurobert": (tf.EuroBertConfig, byte_bpe, dict(**DECODER, num_key_value_heads=2)),
    "gemma3": (tf.Gemma3TextConfig, decoder_tokens, GEMMA),
}
# Not in transformers: the reference is `jina_bert` below, written for this from the published description.
JINA = dict(**BERT, position_embedding_type="alibi", feed_forward_type="geglu", architectures=["JinaBertModel"])
ROBERTA_LIKE = ("roberta", "xlm-roberta", "camembert", "mpnet", "jina_embeddings_v3")
TASKS = {"retrieval.query": "a the ", "retrieval.passage": "the of ", "text-matching": ""}
LORA_RANK, LORA_SCALE = 4, 0.5
NOMIC_MIXTURE = dict(
    model_type="nomic_bert",
    architectures=["NomicBertModel"],
    activation_function="gelu",
    n_embd=32,
    n_head=4,
    n_inner=64,
    n_layer=4,
    n_positions=64,
    num_experts=4,
    moe_top_k=2,
    moe_every_n_layers=2,
    moe_normalize_expert_weights=False,
    expert_choice_router=False,
    num_shared_experts=0,
    qkv_proj_bias=True,
    mlp_fc1_bias=True,
    mlp_fc2_bias=True,
    prenorm=False,
    rotary_emb_base=10000.0,
    rotary_emb_fraction=1.0,
    rotary_emb_interleaved=False,
    type_vocab_size=1,
    layer_norm_epsilon=1e-5,
    pad_token_id=1,
)
LABELS = ["negative", "neutral", "positive"]
# folder -> (family, head, options); a head of one label is a reranker, of three a classifier.
MODELS: dict[str, tuple[str, str, dict]] = {
    "bert-cls": ("bert", "dense", dict(pooling="cls")),
    "bert-dense-tanh": ("bert", "dense", dict(pooling="mean", dense=16)),
    "bert-splade": ("bert", "splade", {}),
    "bert-rerank": ("bert", "scores", dict(labels=1)),
    "bert-classify": ("bert", "scores", dict(labels=3)),
    "bert-f16": ("bert", "dense", dict(pooling="mean", dtype=torch.float16)),
    "roberta-mean": ("roberta", "dense", dict(pooling="mean")),
    "roberta-classify": ("roberta", "scores", dict(labels=3)),
    "roberta-splade": ("roberta", "splade", {}),
    "xlm-roberta-mean": ("xlm-roberta", "dense", dict(pooling="mean")),
    "xlm-roberta-rerank": ("xlm-roberta", "scores", dict(labels=1)),
    "camembert-last": ("camembert", "dense", dict(pooling="lasttoken")),
    "distilbert-mean": ("distilbert", "dense", dict(pooling="mean")),
    "distilbert-classify": ("distilbert", "scores", dict(labels=3)),
    "distilbert-splade": ("distilbert", "splade", {}),
    "mpnet-mean": ("mpnet", "dense", dict(pooling="mean")),
    "mpnet-classify": ("mpnet", "scores", dict(labels=3)),
    "deberta-v3-mean": ("deberta-v3", "dense", dict(pooling="mean")),
    "deberta-v3-rerank": ("deberta-v3", "scores", dict(labels=1)),
    "deberta-v2-conv-mean": ("deberta-v2-conv", "dense", dict(pooling="mean")),
    "deberta-v2-classify": ("deberta-v2", "scores", dict(labels=3)),
    "modernbert-mean": ("modernbert", "dense", dict(pooling="mean")),
    "modernbert-cls": ("modernbert", "dense", dict(pooling="cls")),
    "modernbert-splade": ("modernbert", "splade", {}),
    "modernbert-rerank": ("modernbert", "scores", dict(labels=1)),
    "modernbert-mean-classify": ("modernbert", "scores", dict(labels=3, config=dict(classifier_pooling="mean"))),
    "nomic-mean": ("nomic", "dense", dict(pooling="mean")),
    "gte-cls": ("gte", "dense", dict(pooling="cls")),
    "gte-untyped-cls": ("gte-untyped", "dense", dict(pooling="cls")),
    "gte-rerank": ("gte", "scores", dict(labels=1)),
    "gte-splade": ("gte", "splade", {}),
    "jina-v3-mean": ("jina-v3", "dense", dict(pooling="mean")),
    "qwen2-last": ("qwen2", "dense", dict(pooling="lasttoken")),
    "qwen3-last": ("qwen3", "dense", dict(pooling="lasttoken")),
    "qwen3-rerank": ("qwen3", "scores", dict(labels=1)),
    "mistral-last": ("mistral", "dense", dict(pooling="lasttoken")),
    "llama-last": ("llama", "dense", dict(pooling="lasttoken")),
    "eurobert-mean": ("eurobert", "dense", dict(pooling="mean")),
    "gemma3-mean": ("gemma3", "dense", dict(pooling="mean")),
}
CLASSES = {"dense": "AutoModel", "splade": "AutoModelForMaskedLM", "scores": "AutoModelForSequenceClassification"}


def make(name: str, family: str, head: str, options: dict) -> None:
    """One model folder with its expectations."""
    torch.manual_seed(sum(map(ord, name)))
    folder = TARGET / name
    kind, tokenizer, sizes = FAMILIES[family]
    tokens = tokenizer()
    config = kind(vocab_size=tokens.get_vocab_size(), **sizes, **options.get("config", {}))
    if "labels" in options:
        labels = LABELS if options["labels"] == 3 else ["relevance"]
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    model = getattr(tf, CLASSES[head]).from_config(config).eval()
    for parameter in model.parameters():  # the usual 0.02 leaves all texts alike
        mean, deviation = (0.0, 0.25) if parameter.dim() > 1 else (0.5, 0.2)
        torch.nn.init.normal_(parameter, mean, deviation)
    if "dtype" in options:
        model = model.to(options["dtype"])
    model.save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    pad = tokens.id_to_token(config.pad_token_id)
    length = sizes["max_position_embeddings"] - (2 if kind.model_type in ROBERTA_LIKE else 0)
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=pad, model_max_length=length)
    fast.save_pretrained(folder)
    model = getattr(tf, CLASSES[head]).from_pretrained(folder, dtype=torch.float32).eval()
    expected = {"texts": TEXTS, "pairs": PAIRS, "offsets": offsets(fast)}
    if head == "dense":
        expected["embeddings"], expected["tokens"] = dense(folder, length, options)
    elif head == "splade":
        expected["sparse"] = [sparse(model, fast, text, length) for text in TEXTS]
    else:
        expected["logits"] = [scores(model, fast, (text,), length) for text in TEXTS]
        expected["pair_logits"] = [scores(model, fast, pair, length) for pair in PAIRS]
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0))


def run(model: Any, fast: Any, texts: Any, length: int) -> Any:
    typed = getattr(model.config, "type_vocab_size", 0) > 1
    inputs = fast(*texts, return_tensors="pt", truncation=True, max_length=length, return_token_type_ids=typed)
    with torch.no_grad():
        return model(**inputs).logits[0]


def sparse(model: Any, fast: Any, text: str, length: int) -> list:
    weights = torch.log1p(torch.relu(run(model, fast, (text,), length))).max(dim=0).values
    return [[int(index), float(weights[index])] for index in torch.nonzero(weights)[:, 0]]


def scores(model: Any, fast: Any, texts: Any, length: int) -> list[float]:
    return [float(value) for value in run(model, fast, texts, length)]


def offsets(fast: Any) -> list:
    return [[fast(text)["input_ids"], fast(text, return_offsets_mapping=True)["offset_mapping"]] for text in TEXTS]


def dense(folder: Path, length: int, options: dict) -> tuple[list, list]:
    """The vectors of all texts, and those of each token of the last two."""
    transformer = st.Transformer(str(folder), max_seq_length=length)
    modules = [transformer, st.Pooling(transformer.get_word_embedding_dimension(), pooling_mode=options["pooling"])]
    if "dense" in options:
        modules.append(st.Dense(SIZES["hidden_size"], options["dense"], activation_function=torch.nn.Tanh()))
    modules.append(st.Normalize())
    model = SentenceTransformer(modules=modules, device="cpu").float()
    kept = folder.with_suffix(".st")
    model.save(str(kept), create_model_card=False)
    for part in ("modules.json", "1_Pooling", "2_Dense"):
        if (kept / part).is_dir():
            shutil.copytree(kept / part, folder / part)
        elif (kept / part).exists():
            shutil.copy(kept / part, folder / part)
    shutil.rmtree(kept)
    prompts = {"prompts": {"query": "a the "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return numbers(model.encode(TEXTS, batch_size=1)), [
        numbers(row) for row in model.encode(TEXTS[-2:], batch_size=1, output_value="token_embeddings")
    ]


def numbers(rows: Any) -> list[list[float]]:
    return [[round(float(value), 7) for value in row] for row in rows]


def write_pooling(folder: Path, mode: str) -> None:
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))


def make_jina(name: str, code: bool) -> None:
    """JinaBERT version 2. transformers has no such model: `jina_bert` is the reference."""
    folder, tokens = TARGET / name, bert_tokens()
    write_pooling(folder, "mean")
    tokens.save(str(folder / "tokenizer.json"))
    config = dict(JINA, model_type="bert", vocab_size=tokens.get_vocab_size())
    if code:
        config["auto_map"] = {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(len(name))
    weights = {key: torch.randn(shape) * 0.25 + 0.5 * (len(shape) == 1) for key, shape in jina_shapes(config, code)}
    save_file(weights, folder / "model.safetensors")
    hidden = [jina_bert(weights, torch.tensor(tokens.encode(text).ids[:64]), code) for text in TEXTS]
    vectors = [torch.nn.functional.normalize(rows.mean(dim=0), dim=0) for rows in hidden]
    expected = dict(texts=TEXTS, embeddings=numbers(vectors), tokens=[numbers(rows) for rows in hidden[-2:]])
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0))


def jina_shapes(config: dict, code: bool) -> list[tuple[str, tuple[int, ...]]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    norms = ["embeddings.LayerNorm"]
    shapes: list[tuple[str, tuple[int, ...]]] = [("embeddings.word_embeddings.weight", (config["vocab_size"], width))]
    shapes.append(("embeddings.token_type_embeddings.weight", (2, width)))
    up, down = ("up_gated_layer", "down_layer") if code else ("gated_layers", "wo")
    for number in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{number}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes += [(f"{at}attention.{part}.weight", (width, width)), (f"{at}attention.{part}.bias", (width,))]
        shapes.append((f"{at}mlp.{up}.weight", (2 * inner, width)))
        shapes += [(f"{at}mlp.{down}.weight", (width, inner)), (f"{at}mlp.{down}.bias", (width,))]
        norms.append(f"{at}attention.output.LayerNorm")
        own = ["attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"]
        norms += [at + part for part in (own if code else ["mlp.layernorm"])]
    return shapes + [(f"{norm}.{part}", (width,)) for norm in norms for part in ("weight", "bias")]


def jina_bert(weights: dict, ids: torch.Tensor, code: bool) -> torch.Tensor:
    """One text, [tokens, width], in plain steps."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift, 1e-12)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    places = torch.arange(len(ids))
    far = (places[:, None] - places[None]).abs()
    heads = SIZES["num_attention_heads"]
    slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
    for number in range(SIZES["num_hidden_layers"]):
        at = f"encoder.layer.{number}."
        query, key, value = (linear(x, f"{at}attention.self.{part}") for part in ("query", "key", "value"))
        if code:
            query = norm(query, f"{at}attention.self.layer_norm_q")
            key = norm(key, f"{at}attention.self.layer_norm_k")
        query, key, value = (part.view(len(ids), heads, -1).transpose(0, 1) for part in (query, key, value))
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5 - slopes[:, None, None] * far
        mixed = (scores.softmax(dim=-1) @ value).transpose(0, 1).reshape(len(ids), -1)
        attended = norm(linear(mixed, f"{at}attention.output.dense") + x, f"{at}attention.output.LayerNorm")
        if code:
            attended = norm(attended + x, f"{at}layer_norm_1")
            up, gate = linear(attended, f"{at}mlp.up_gated_layer").chunk(2, dim=-1)
            inner = linear(up * torch.nn.functional.gelu(gate), f"{at}mlp.down_layer")
            x = norm(inner + attended, f"{at}layer_norm_2")
        else:
            gate, up = linear(attended, f"{at}mlp.gated_layers").chunk(2, dim=-1)
            inner = linear(torch.nn.functional.gelu(gate) * up, f"{at}mlp.wo")
            x = norm(inner + attended, f"{at}mlp.layernorm")
    return x


def make_adapters(name: str) -> None:
    """jina-embeddings-v3 as published: the weights of transformers' model under longer names, and an adapter for each
    task beside them. The reference for a task is transformers' model with that adapter added to its weights."""
    make(name, "jina-v3", "dense", dict(pooling="mean"))
    folder = TARGET / name
    weights = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}  # it is rewritten
    lines = [key for key, value in weights.items() if value.dim() > 1]
    parts = {key: adapters_of(weights[key], is_table="embeddings" in key) for key in lines}
    expected = json.loads((folder / "expected.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    expected["adapted"] = {}
    for number, (task, prompt) in enumerate(TASKS.items()):
        added = {
            key: down[number] @ up[number] if "embeddings" in key else up[number] @ down[number]
            for key, (down, up) in parts.items()
        }
        merged = {key: value + LORA_SCALE * added[key] if key in added else value for key, value in weights.items()}
        save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
        transformer = st.Transformer(str(folder), max_seq_length=64)
        pooling = st.Pooling(transformer.get_word_embedding_dimension(), pooling_mode="mean")
        model = SentenceTransformer(modules=[transformer, pooling, st.Normalize()], device="cpu")
        expected["adapted"][task] = numbers(model.encode([prompt + text for text in TEXTS], batch_size=1))
    published: dict[str, torch.Tensor] = {}
    for key, value in weights.items():
        if key in parts:
            at = f"roberta.{key.removesuffix('.weight')}.parametrizations.weight"
            down, up = parts[key]
            published |= {f"{at}.original": value, f"{at}.0.lora_A": down, f"{at}.0.lora_B": up}
        else:
            published[f"roberta.{key}"] = value
    save_file({key: value.contiguous() for key, value in published.items()}, folder / "model.safetensors")
    for key in ("rope_parameters", "transformers_version"):
        del config[key]
    config |= dict(
        model_type="xlm-roberta",
        architectures=["XLMRobertaModel"],
        auto_map={"AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration.XLMRobertaFlashConfig"},
        position_embedding_type="rotary",
        rotary_emb_base=20000.0,
        lora_adaptations=list(TASKS),
        lora_rank=LORA_RANK,
        lora_alpha=LORA_RANK * LORA_SCALE,
        task_instructions={task: prompt for task, prompt in TASKS.items() if prompt},
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {}, "default_prompt_name": None}))
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0))


def adapters_of(weight: torch.Tensor, is_table: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of all tasks, as the published files have them: A and B, of a table in the other order."""
    out, width = weight.shape
    shapes = [(out, LORA_RANK), (LORA_RANK, width)] if is_table else [(LORA_RANK, width), (out, LORA_RANK)]
    down, up = (torch.randn(len(TASKS), *shape) * 0.25 for shape in shapes)
    return down, up


def make_jina_reranker(name: str) -> None:
    """jina-reranker-v2: XLM-R under the names of Jina's code, with query, key and value in one layer."""
    make(name, "xlm-roberta", "scores", dict(labels=1))
    folder = TARGET / name
    weights = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}  # it is rewritten
    names = {
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "norm2",
        "embeddings.LayerNorm": "emb_ln",
        "encoder.layer.": "encoder.layers.",
    }
    published = {}
    for key, value in weights.items():
        if "attention.self." in key:
            at, _, kind = key.partition("attention.self.")
            if kind.startswith("query"):
                own = [
                    weights[f"{at}attention.self.{kind.replace('query', part)}"] for part in ("query", "key", "value")
                ]
                key, value = f"{at}mixer.Wqkv.{kind.rpartition('.')[2]}", torch.cat(own)
            else:
                continue
        for old, new in names.items():
            key = key.replace(old, new)
        published[key] = value.contiguous()
    save_file(published, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def make_mixture(name: str) -> None:
    """nomic-embed-text-v2-moe. transformers has no such model: `nomic_mixture` is the reference."""
    folder, tokens = TARGET / name, unigram()
    write_pooling(folder, "mean")
    tokens.save(str(folder / "tokenizer.json"))
    config = dict(NOMIC_MIXTURE, vocab_size=tokens.get_vocab_size())
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(len(name))
    weights = {key: torch.randn(shape) * 0.25 + 0.5 * (len(shape) == 1) for key, shape in mixture_shapes(config)}
    save_file(weights, folder / "model.safetensors")
    tokens.enable_truncation(64)
    hidden = [nomic_mixture(weights, config, torch.tensor(tokens.encode(text).ids)) for text in TEXTS]
    vectors = [torch.nn.functional.normalize(rows.mean(dim=0), dim=0) for rows in hidden]
    expected = dict(texts=TEXTS, embeddings=numbers(vectors), tokens=[numbers(rows) for rows in hidden[-2:]])
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0))


def mixture_shapes(config: dict) -> list[tuple[str, tuple[int, ...]]]:
    width, inner, experts = config["n_embd"], config["n_inner"], config["num_experts"]
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("embeddings.word_embeddings.weight", (config["vocab_size"], width)),
        ("embeddings.token_type_embeddings.weight", (1, width)),
    ]
    lines: dict[str, tuple[int, int]] = {}
    norms = ["emb_ln"]
    for number in range(config["n_layer"]):
        at = f"encoder.layers.{number}."
        lines |= {f"{at}attn.Wqkv": (3 * width, width), f"{at}attn.out_proj": (width, width)}
        norms += [f"{at}norm1", f"{at}norm2"]
        if number % config["moe_every_n_layers"] == 1:
            shapes.append((f"{at}mlp.router.layer.weight", (experts, width)))
            shapes += [(f"{at}mlp.experts.mlp.{part}", (experts * inner, width)) for part in ("w1", "w2")]
            shapes.append((f"{at}mlp.experts.bias", (width,)))
        else:
            lines |= {f"{at}mlp.fc1": (inner, width), f"{at}mlp.fc2": (width, inner)}
    for line, (out, into) in lines.items():
        shapes += [(f"{line}.weight", (out, into)), (f"{line}.bias", (out,))]
    return shapes + [(f"{norm}.{part}", (width,)) for norm in norms for part in ("weight", "bias")]


def nomic_mixture(weights: dict, config: dict, ids: torch.Tensor) -> torch.Tensor:
    """One text, [tokens, width], in plain steps; each token takes its experts one after the other."""
    gelu = torch.nn.functional.gelu

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config["layer_norm_epsilon"]
        )

    heads, inner = config["n_head"], config["n_inner"]
    size = config["n_embd"] // heads
    frequencies = 1 / config["rotary_emb_base"] ** (torch.arange(0, size, 2) / size)
    angles = torch.arange(len(ids))[:, None] * frequencies

    def turned(x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([one * cosines - other * sines, other * cosines + one * sines], dim=-1)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "emb_ln")
    for number in range(config["n_layer"]):
        at = f"encoder.layers.{number}."
        parts = [part.view(len(ids), heads, size).transpose(0, 1) for part in linear(x, f"{at}attn.Wqkv").chunk(3, -1)]
        query, key, value = turned(parts[0]), turned(parts[1]), parts[2]
        scores = (query @ key.transpose(1, 2) / size**0.5).softmax(dim=-1)
        mixed = (scores @ value).transpose(0, 1).reshape(len(ids), -1)
        x = norm(linear(mixed, f"{at}attn.out_proj") + x, f"{at}norm1")
        if number % config["moe_every_n_layers"] == 1:
            rows = []
            for row in x:
                chances = (weights[f"{at}mlp.router.layer.weight"] @ row).softmax(dim=-1)
                total = weights[f"{at}mlp.experts.bias"].clone()
                for expert in chances.argsort(descending=True)[: config["moe_top_k"]]:
                    own = slice(int(expert) * inner, (int(expert) + 1) * inner)
                    raised = gelu(weights[f"{at}mlp.experts.mlp.w1"][own] @ row)
                    total += chances[expert] * (raised @ weights[f"{at}mlp.experts.mlp.w2"][own])
                rows.append(total)
            made = torch.stack(rows)
        else:
            made = linear(gelu(linear(x, f"{at}mlp.fc1")), f"{at}mlp.fc2")
        x = norm(made + x, f"{at}norm2")
    return x


def make_static(name: str) -> None:
    """A model2vec folder; the reference is the module of sentence-transformers that reads it."""
    folder, tokens = TARGET / name, bert_tokens()
    folder.mkdir(parents=True)
    torch.manual_seed(5)
    table = torch.randn(tokens.get_vocab_size(), 24)
    tokens.save(str(folder / "tokenizer.json"))
    save_file({"embeddings": table}, folder / "model.safetensors")
    config = dict(model_type="model2vec", architectures=["StaticModel"], hidden_dim=24, seq_length=64, normalize=True)
    (folder / "config.json").write_text(json.dumps(config))
    modules = [(".", "models.StaticEmbedding"), ("1_Normalize", "models.Normalize")]
    listed = [
        dict(idx=at, name=str(at), path=path, type=f"sentence_transformers.{kind}")
        for at, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    model = SentenceTransformer(
        modules=[st.StaticEmbedding(tokens, embedding_weights=table), st.Normalize()], device="cpu"
    )
    texts = [text for text in TEXTS if len(tokens.encode(text, add_special_tokens=False)) <= 64]
    expected = dict(texts=texts, embeddings=numbers(model.encode(texts, batch_size=1)))
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0))


if __name__ == "__main__":
    makers: dict[str, Callable[[], None]] = {name: partial(make, name, *model) for name, model in MODELS.items()}
    makers |= {"jina-v2-mean": partial(make_jina, "jina-v2-mean", code=False)}
    makers |= {"jina-v2-code-mean": partial(make_jina, "jina-v2-code-mean", code=True)}
    makers |= {"jina-v3-adapters-mean": partial(make_adapters, "jina-v3-adapters-mean")}
    makers |= {"jina-v2-rerank": partial(make_jina_reranker, "jina-v2-rerank")}
    makers |= {"nomic-mixture-mean": partial(make_mixture, "nomic-mixture-mean")}
    makers |= {"static-mean": partial(make_static, "static-mean")}
    for name in sys.argv[1:] or makers:
        shutil.rmtree(TARGET / name, ignore_errors=True)
        makers[name]()
        print(name, sum(file.stat().st_size for file in (TARGET / name).rglob("*") if file.is_file()) // 1024, "kB")
