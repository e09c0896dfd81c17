"""Texts for tests and benchmarks: always the same, of very different lengths, in several scripts."""

import random

WORDS = (
    "the a of and vector search engine retrieves documents by meaning rather than keywords model replica queue latency "
    "throughput is was not very quickly slowly river mountain protein ledger contract violin tax winter orbit enzyme "
    "Überraschung naïve café Straße москва данные 東京 検索 데이터 البحث 🚀 x1 3.14159 "
    "e-mail GPU's well-known (sic) --flag"
).split()


def mixed_texts(count: int, seed: int = 7) -> list[str]:
    """``count`` texts of 1 to about 300 words; half of them short, as queries are (mean 57 MiniLM tokens)."""
    choice = random.Random(seed)
    texts = []
    for _ in range(count):
        words = choice.choice((choice.randint(1, 12), choice.randint(3, 40), choice.randint(10, 90)))
        if choice.random() < 0.02:
            words = choice.randint(150, 300)
        texts.append(" ".join(choice.choice(WORDS) for _ in range(words)))
    return texts
