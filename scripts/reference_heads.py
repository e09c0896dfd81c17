"""Write tests/data/heads/: small models with random weights that give more than one vector, and what libraries say.

Token vectors (ColBERT, as three libraries keep it), BGE-M3's three heads in one, and a language model that is asked
whether a document answers a query. Made and used as tests/data/families; run in the same environment:
    python scripts/reference_heads.py [NAME ...]
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import AddedToken, Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.reference_families import (
    BERT,
    DECODER,
    PAIRS,
    ROBERTA,
    ROOT,
    SIZES,
    TEXTS,
    bert_tokens,
    byte_bpe,
    numbers,
    unigram,
    write_pooling,
)

TARGET = ROOT / "tests" / "data" / "heads"
WIDTH = 8  # of token vectors
QUERIES = ["a", "what is " + TEXTS[0][:20], TEXTS[3]]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
CHAT = """{%- set system = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|im_start|>system
Judge whether the Document answers the Query. The answer is "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ system }}
<Query>: {{ query }}
<Document>: {{ document }}<|im_end|>
<|im_start|>assistant
"""


def saved(folder: Path, model: Any, tokens: Tokenizer, length: int, **special: str) -> None:
    """A model of transformers with weights that tell texts apart, and its tokenizer."""
    for parameter in model.parameters():
        mean, deviation = (0.0, 0.25) if parameter.dim() > 1 else (0.5, 0.2)
        torch.nn.init.normal_(parameter, mean, deviation)
    model.save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    tf.PreTrainedTokenizerFast(tokenizer_object=tokens, model_max_length=length, **special).save_pretrained(folder)


BERT_WORDS = dict(pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def bert(folder: Path, tokens: Tokenizer) -> None:
    config = tf.BertConfig(vocab_size=tokens.get_vocab_size(), **BERT)
    saved(folder, tf.AutoModel.from_config(config), tokens, BERT["max_position_embeddings"], **BERT_WORDS)


def write_expected(folder: Path, **expected: Any) -> None:
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0))


def write_token_vectors(folder: Path) -> None:
    """As sentence-transformers reads the folder."""
    model = MultiVectorEncoder(str(folder), device="cpu").float()
    queries, documents = (
        [numbers(encode([text])[0]) for text in texts]
        for encode, texts in ((model.encode_query, QUERIES), (model.encode_document, TEXTS))
    )
    scores = model.similarity(model.encode_query(QUERIES), model.encode_document(TEXTS))
    write_expected(folder, queries=QUERIES, texts=TEXTS, query=queries, document=documents, maxsim=numbers(scores))


def colbert(folder: Path) -> None:
    """Modules of sentence-transformers; a query is never cut, and what fills it up is seen by its other tokens."""
    bert(folder, bert_tokens())
    expansion = {"strategy": "min", "length": 12, "attend": True}
    modules = [
        Transformer(str(folder), query_expansion=expansion, document_length=40),
        Dense(32, WIDTH, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"),
        MultiVectorMask(skiplist_words=[",", "a", "no such word"]),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "what is a ", "document": "in "}
    model = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    model.save(str(folder), create_model_card=False)
    write_token_vectors(folder)


def colbert_pylate(folder: Path) -> None:
    """PyLate's keys: marks that are added tokens, and punctuation without vectors."""
    tokens = bert_tokens()
    tokens.add_tokens(["[Q] ", "[D] "])
    bert(folder, tokens)
    layer = {"in_features": 32, "out_features": WIDTH, "bias": False}
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": torch.randn(WIDTH, 32)}, folder / "1_Dense" / "model.safetensors")
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(layer | activation))
    kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    modules = [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    knobs = dict(query_prefix="[Q] ", document_prefix="[D] ", query_length=16, document_length=30)
    model = dict(model_type="ColBERT", prompts={}, attend_to_expansion_tokens=False, similarity_fn_name="MaxSim")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(model | knobs))
    (folder / "sentence_bert_config.json").write_text(json.dumps(dict(max_seq_length=29, do_lower_case=False)))
    write_token_vectors(folder)


def colbert_stanford(folder: Path) -> None:
    """The first ColBERT: its linear layer among the weights, its marks among the unused words."""
    tokens = bert_tokens()
    tokens.add_tokens(["[unused0]", "[unused1]"])
    described = json.loads(tokens.to_str())
    vocabulary = described["model"]["vocab"]
    for added in described["added_tokens"][-2:]:
        vocabulary[added["content"]] = added["id"]
    described["added_tokens"] = described["added_tokens"][:-2]
    bert(folder, Tokenizer.from_str(json.dumps(described)))
    weights = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file({**weights, "linear.weight": torch.randn(WIDTH, 32)}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = dict(query_token_id="[unused0]", doc_token_id="[unused1]", query_maxlen=14, doc_maxlen=26)
    (folder / "artifact.metadata").write_text(json.dumps(metadata | dict(mask_punctuation=True)))
    write_token_vectors(folder)


def bge_m3(folder: Path) -> None:
    """Dense, sparse and token vectors of one pass; the reference is written here from the published description."""
    tokens = unigram()
    config = tf.XLMRobertaConfig(vocab_size=tokens.get_vocab_size(), **ROBERTA)
    words = dict(pad_token="<pad>", unk_token="<unk>", cls_token="<s>", eos_token="</s>", mask_token="<mask>")
    saved(folder, tf.AutoModel.from_config(config), tokens, 64, **words)
    write_pooling(folder, "cls")
    sparse, colbert = torch.nn.Linear(32, 1), torch.nn.Linear(32, 16)
    torch.save(sparse.state_dict(), folder / "sparse_linear.pt")
    torch.save(colbert.half().state_dict(), folder / "colbert_linear.pt")
    colbert = colbert.float()
    model = tf.AutoModel.from_pretrained(folder).eval()
    special = {tokens.token_to_id(word) for word in ("<s>", "</s>", "<pad>", "<unk>")}
    expected: dict[str, list] = dict(embeddings=[], sparse=[], tokens=[])
    for text in TEXTS:
        ids = tokens.encode(text).ids
        ids = ids if len(ids) <= 64 else [*ids[:63], ids[-1]]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            weights = torch.relu(sparse(hidden))[:, 0].tolist()
            rows = torch.nn.functional.normalize(colbert(hidden[1:]), dim=-1)
        largest: dict[int, float] = {}
        for number, weight in zip(ids, weights, strict=True):
            if number not in special and weight > 0:
                largest[number] = max(largest.get(number, 0.0), weight)
        expected["embeddings"].append(numbers([torch.nn.functional.normalize(hidden[0], dim=0)])[0])
        expected["sparse"].append(sorted([number, round(weight, 7)] for number, weight in largest.items()))
        expected["tokens"].append(numbers(rows))
    write_expected(folder, texts=TEXTS, **expected)


def qwen3_judge(folder: Path) -> None:
    """Qwen3's reranker: the logit of yes minus that of no, in a chat."""
    tokens = byte_bpe()
    tokens.add_special_tokens([AddedToken(word, special=True) for word in ("<|im_start|>", "<|im_end|>")])
    tokens.post_processor = None
    sizes = {**DECODER, "max_position_embeddings": 512}
    config = tf.Qwen3Config(
        vocab_size=tokens.get_vocab_size(), num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, **sizes
    )
    saved(folder, tf.AutoModelForCausalLM.from_config(config), tokens, 400, pad_token="<pad>", eos_token="</s>")
    (folder / "chat_template.jinja").write_text(CHAT)
    transformer = Transformer(
        str(folder), transformer_task="text-generation", processor_kwargs={"padding_side": "left"}
    )
    answers = [tokens.encode(word).ids[0] for word in ("yes", "no")]
    modules = [transformer, LogitScore(true_token_id=answers[0], false_token_id=answers[1])]
    prompts = {"web": INSTRUCTION, "other": "Say yes"}
    made = CrossEncoder(modules=modules, prompts=prompts, default_prompt_name="web", device="cpu")
    made.save_pretrained(str(folder), create_model_card=False)
    model = CrossEncoder(str(folder), device="cpu").float()
    scores = [float(model.predict([pair], activation_fn=torch.nn.Identity())[0]) for pair in PAIRS]
    write_expected(folder, pairs=PAIRS, scores=scores)


MODELS = {
    "colbert": colbert,
    "colbert-pylate": colbert_pylate,
    "colbert-stanford": colbert_stanford,
    "bge-m3": bge_m3,
    "qwen3-judge": qwen3_judge,
}

if __name__ == "__main__":
    assert SIZES["hidden_size"] == 32
    for name in sys.argv[1:] or MODELS:
        shutil.rmtree(TARGET / name, ignore_errors=True)
        torch.manual_seed(sum(map(ord, name)))
        MODELS[name](TARGET / name)
        print(name, sum(file.stat().st_size for file in (TARGET / name).rglob("*") if file.is_file()) // 1024, "kB")
