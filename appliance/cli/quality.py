"""`appliance bench --quality`: how well an instance finds texts again, with vectors in each smaller format.

Each query has one document that answers it. nDCG@10 is 1 / log2(1 + rank) of that document among all, 0 from rank 11
on, as a mean over the queries; `kept` is how many of the ten that float32 found are still among the first ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from appliance.cli.bench import Options, Sender, open_channel
from appliance.cli.multiplexer_client import problem_from_rpc
from appliance.core.problems import invalid
from appliance.wire.quantization import CONVERSIONS
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

BEST = 10
FEWEST_WORDS = 6  # of a line that is cut into a query and its document
COLUMNS = ("format", "dimensions", "bytes", "nDCG@10", "change", "kept")
# (dtype, the part of the full width): uint8 and ubinary hold what int8 and binary hold.
FORMATS = (
    ("float32", 1),
    ("float16", 1),
    ("int8", 1),
    ("binary", 1),
    ("float32", 2),
    ("int8", 2),
    ("float32", 4),
)
PLACES = (
    "the old library on Mill Street",
    "the swimming hall in Northfield",
    "the railway museum",
    "the botanical garden",
    "the observatory on the hill",
    "the harbour ferry",
    "the city theatre",
    "the climbing centre",
    "the farmers' market",
    "the ice rink",
    "the castle of Arden",
    "the maritime archive",
    "the youth hostel by the lake",
    "the music school",
    "the mountain cable car",
    "the glass workshop",
    "the university clinic",
    "the recycling yard",
    "the bicycle station",
    "the planetarium",
)
# A fact about a place, and the question that asks for it in other words.
FACTS = (
    ("Doors open at nine in the morning at {0}.", "When can I enter {0}?"),
    ("A ticket for {0} costs eleven euros, half of it for pupils.", "How much do I pay at {0}?"),
    ("Dogs have to stay outside {0}.", "May I bring my pet to {0}?"),
    ("Bus number seven stops right in front of {0}.", "How do I get to {0} without a car?"),
    ("{0} was built in 1894 by two brothers.", "How old is {0}, and who founded it?"),
    ("There is a ramp and a lift for wheelchairs at {0}.", "Is {0} accessible for disabled visitors?"),
    ("On Mondays {0} stays shut for cleaning.", "On which day of the week is {0} closed?"),
    ("The kitchen of {0} serves soup and cake until four.", "Where can we eat something at {0}?"),
    ("Lost umbrellas and bags are kept for a month by {0}.", "I forgot my jacket at {0}; what now?"),
    ("Groups of ten or more book a tour of {0} by telephone.", "How does a school class arrange a visit to {0}?"),
)


class Quality(NamedTuple):
    """One format. bytes: of a vector; change: of ndcg_at_10, against float32 of full width; kept: 0 to 1."""

    output_dtype: str
    dimensions: int
    bytes: int
    ndcg_at_10: float
    change: float
    kept: float

    def row(self) -> dict[str, Any]:
        cells = (self.dimensions, self.bytes, f"{self.ndcg_at_10:.4f}", f"{self.change:+.4f}", f"{self.kept:.1%}")
        return dict(zip(COLUMNS, (self.output_dtype, *cells), strict=True))


def measure_formats(options: Options) -> list[Quality]:
    """Each of FORMATS over gRPC. Raises: Problem when the instance cannot answer, or the texts cannot be used."""
    pairs = pairs_of(options.texts)
    with open_channel(options) as channel:
        sender = Sender(TeiMultiplexerStub(channel), options)
        try:
            return qualities(sender, pairs)
        except grpc.RpcError as error:
            raise problem_from_rpc(error) from error


def pairs_of(file: str | None) -> list[tuple[str, str]]:
    """(query, document): of the places above, or the first and the second half of each line of a file."""
    if file is None:
        return [(question.format(place), fact.format(place)) for place in PLACES for fact, question in FACTS]
    try:
        lines = list(dict.fromkeys(Path(file).read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"Cannot read the texts {file}: {error}") from error
    split = [line.split() for line in lines]
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in split if len(words) >= FEWEST_WORDS]
    if len(halves) <= BEST:
        raise invalid(f"{file} needs over {BEST} different lines of at least {FEWEST_WORDS} words for --quality")
    return [(" ".join(query), " ".join(document)) for query, document in halves]


def qualities(sender: Sender, pairs: Sequence[tuple[str, str]]) -> list[Quality]:
    texts = [query for query, _ in pairs] + [document for _, document in pairs]
    measured: list[Quality] = []
    first, full_width = np.zeros((0, 0)), 0
    for number, (dtype, part) in enumerate(FORMATS):
        fields = {"dimensions": full_width // part} if part > 1 else {}
        column = sender.arrow_column(texts, output_dtype=list(CONVERSIONS).index(dtype), **fields)
        rows = np.stack(column.to_numpy())
        full_width = full_width or rows.shape[1]
        best = ranked(as_floats(dtype, rows), len(pairs))
        first = first if number else best
        gain = ndcg(best)
        kept = float(np.mean([len(np.intersect1d(one, two)) / len(one) for one, two in zip(best, first, strict=True)]))
        change = gain - (measured[0].ndcg_at_10 if measured else gain)
        measured.append(Quality(dtype, full_width // part, rows[0].nbytes, gain, change, kept))
    return measured


def as_floats(dtype: str, rows: np.ndarray) -> np.ndarray:
    """Vectors as numbers that can be compared by their product: signs as 1 and -1."""
    if dtype == "binary":
        bits = np.unpackbits((rows.astype(np.int16) + 128).astype(np.uint8), axis=-1)
        return bits.astype(np.float32) * 2 - 1
    return rows.astype(np.float32)


def ranked(vectors: np.ndarray, queries: int) -> np.ndarray:
    """[queries, 10]: the numbers of the nearest documents of each query, the first ones first among equals."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(lengths == 0, 1, lengths)
    scores = unit[:queries] @ unit[queries:].T
    return np.argsort(-scores, axis=1, kind="stable")[:, :BEST]


def ndcg(best: np.ndarray) -> float:
    """Document i answers query i."""
    rows, ranks = np.nonzero(best == np.arange(len(best))[:, None])
    gains = np.zeros(len(best))
    gains[rows] = 1 / np.log2(2 + ranks)
    return float(gains.mean())
