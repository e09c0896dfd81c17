"""Write tests/data/families/: one small model with random weights for each family and head, and what transformers says.

Each folder is a complete model (config.json, tokenizer.json, model.safetensors) with `expected.json`: the inputs and
the reference library's own numbers. Run once (the numbers in the tree: transformers 5.23, torch 2.13.0, CPU):
    pip install torch==2.13.0 sentence-transformers==6.2.0
    python scripts/reference_families.py
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf
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


BERT = dict(pad_token_id=0, max_position_embeddings=64, type_vocab_size=2, **SIZES)
ROBERTA = dict(pad_token_id=1, max_position_embeddings=66, type_vocab_size=1, **SIZES)
FAMILIES = {
    "bert": (tf.BertConfig, bert_tokens, BERT),
    "roberta": (tf.RobertaConfig, byte_bpe, ROBERTA),
    "xlm-roberta": (tf.XLMRobertaConfig, unigram, ROBERTA),
    "camembert": (tf.CamembertConfig, unigram, ROBERTA),
    "distilbert": (tf.DistilBertConfig, bert_tokens, dict(pad_token_id=0, max_position_embeddings=64, **DISTIL)),
    "mpnet": (tf.MPNetConfig, mpnet_tokens, dict(pad_token_id=1, max_position_embeddings=66, **SIZES)),
}
LABELS = ["negative", "neutral", "positive"]
# folder -> (family, head, options); a head of one label is a reranker, of three a classifier.
MODELS = {
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
}
CLASSES = {"dense": "AutoModel", "splade": "AutoModelForMaskedLM", "scores": "AutoModelForSequenceClassification"}


def make(name: str, family: str, head: str, options: dict) -> None:
    """One model folder with its expectations."""
    torch.manual_seed(sum(map(ord, name)))
    folder = TARGET / name
    kind, tokenizer, sizes = FAMILIES[family]
    tokens = tokenizer()
    config = kind(vocab_size=tokens.get_vocab_size(), **sizes)
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
    length = sizes["max_position_embeddings"] - (2 if family in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0)
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=pad, model_max_length=length)
    fast.save_pretrained(folder)
    model = getattr(tf, CLASSES[head]).from_pretrained(folder, dtype=torch.float32).eval()
    expected = {"texts": TEXTS, "pairs": PAIRS, "offsets": offsets(fast)}
    if head == "dense":
        expected["embeddings"] = dense(folder, fast, options, length)
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


def dense(folder: Path, fast: Any, options: dict, length: int) -> list:
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
    return [[float(value) for value in row] for row in model.encode(TEXTS, batch_size=1)]


if __name__ == "__main__":
    shutil.rmtree(TARGET, ignore_errors=True)
    for name, (family, head, options) in MODELS.items():
        assert isinstance(options, dict)
        make(name, family, head, options)
        print(name, sum(file.stat().st_size for file in (TARGET / name).rglob("*") if file.is_file()) // 1024, "kB")
