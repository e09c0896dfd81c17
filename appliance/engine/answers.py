"""What each RPC of `tei.v1` does with a request: it checks the request, queues its texts, and makes the reply.

The defaults of unset fields, the order of the checks and the status of each failure are TEI's (1.9).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from appliance.core.multivector import DOCUMENT, QUERY
from appliance.core.problems import Kind, Problem, invalid
from appliance.engine.heads import entries_of
from appliance.engine.intake import Lane
from appliance.engine.model import LoadedModel
from appliance.engine.pooling import descending, normalized, pooled, probabilities, projected
from appliance.engine.special_tokens import MultivectorTokens
from appliance.engine.tokens import Text, validation
from appliance.engine.worker import Reduce, TextJob, backend, whole
from appliance.wire.rowusage import LARGEST_COUNT
from appliance.wire.scoring import maxsim
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2 import EmbedHybridRequest, EmbedHybridResponse
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest
from appliance.wire.vectors import length_delimited, pack

LEFT = tei.TRUNCATION_DIRECTION_LEFT
DIRECTIONS = (tei.TRUNCATION_DIRECTION_RIGHT, LEFT)

Finish = Callable[[list[Any], bytes], bytes]  # (rows of the texts, serialized Metadata) -> serialized reply


@dataclass
class Pending:
    """A request in work: its jobs, and the function that turns their rows into the reply."""

    kind: str  # embed or predict, as TEI's metrics have it
    finish: Finish
    characters: int
    began_at: float = field(default_factory=time.monotonic)
    jobs: list[TextJob] = field(default_factory=list)

    def reply(self) -> bytes:
        """Wait for the rows and make the reply. Raises: Problem, or CancelledError after `cancel`."""
        rows = [job.outcome.result() for job in self.jobs]
        self.took = self.seconds()
        self.times = self.metadata(self.took)
        return self.finish(rows, self.times.SerializeToString())

    def cancel(self) -> None:
        for job in self.jobs:
            job.outcome.cancel()

    def seconds(self) -> list[float]:
        """total, tokenization, queue, inference: the first is that of the call, the others are means over its texts."""
        spent = [(job.encode_secs, job.started_at - job.queued_at, job.ended_at - job.started_at) for job in self.jobs]
        return [time.monotonic() - self.began_at, *map(mean, zip(*spent, strict=True))]

    def metadata(self, seconds: Sequence[float]) -> tei.Metadata:
        total, tokenization, waiting, inference = (max(0, int(value * 1e9)) for value in seconds)
        return tei.Metadata(
            compute_chars=min(self.characters, LARGEST_COUNT),
            compute_tokens=sum(len(job.encoding) for job in self.jobs),
            total_time_ns=total,
            tokenization_time_ns=tokenization,
            queue_time_ns=waiting,
            inference_time_ns=inference,
        )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Answers:
    """All RPCs of one model. lane: how the texts of a request go to the model."""

    def __init__(self, model: LoadedModel, max_client_batch_size: int) -> None:
        self.model = model
        self.card = model.card
        self.max_client_batch_size = max_client_batch_size

    # -- embeddings -------------------------------------------------------------------------------------------------

    def embed(self, request: tei.EmbedRequest, lane: Lane) -> Pending:
        self.require("embedding", "sparse", does="embed")
        normalize = request.normalize if request.HasField("normalize") else True
        if self.card.task == "sparse" and normalize:
            raise backend("normalize is not possible with splade pooling: set normalize to false")
        width = self.width_of(request)

        def finish(rows: list[np.ndarray], times: bytes) -> bytes:
            return pack(rows[0]) + length_delimited(2, times)

        pooling = self.card.pooling if self.card.task == "embedding" else None
        return self.one_text("embed", request, lane, finish, self.dense_vector(width, normalize), pooling)

    def dense_vector(self, width: int, normalize: bool) -> Reduce:
        """A `Reduce` to [width]."""

        def reduce(part: np.ndarray, encoding: Any) -> np.ndarray:
            if self.card.task == "embedding":
                part = part if part.ndim == 1 else pooled(part, self.card.pooling)
                part = projected(part, self.model.dense)
            vector = part[:width]
            if normalize:
                return unit(vector)
            refuse_infinite(vector, "vector with a value")
            return vector.copy()

        return reduce

    def width_of(self, request: Any) -> int:
        if not request.HasField("dimensions"):
            return self.model.width
        if not 0 < request.dimensions <= self.model.width:
            raise validation(f"`dimensions` must be between 1 and {self.model.width}. Given: {request.dimensions}")
        return request.dimensions

    def embed_sparse(self, request: tei.EmbedSparseRequest, lane: Lane) -> Pending:
        self.require("sparse", does="embed_sparse")

        def finish(rows: list[np.ndarray], times: bytes) -> bytes:
            reply = tei.EmbedSparseResponse(sparse_embeddings=sparse_values(rows[0]))
            return reply.SerializeToString() + length_delimited(2, times)

        return self.one_text("embed", request, lane, finish, self.sparse_entries)

    def sparse_entries(self, part: np.ndarray, encoding: Any) -> np.ndarray:
        """[words] of ENTRY: of SPLADE's row of the vocabulary, or of hidden states."""
        refuse_infinite(part, "vector with a value")
        if self.model.sparse_head:
            return self.model.sparse_head.entries(part, encoding.ids)
        (indices,) = np.nonzero(part)
        return entries_of(indices, part[indices])

    def embed_all(self, request: tei.EmbedAllRequest, lane: Lane) -> Pending:
        self.require("embedding", "multivector", does="embed_all")

        def finish(rows: list[np.ndarray], times: bytes) -> bytes:
            tokens = b"".join(length_delimited(1, pack(vector)) for vector in rows[0])
            return tokens + length_delimited(2, times)

        return self.one_text("embed", request, lane, finish, self.token_vectors(prompt_name_of(request)))

    def token_vectors(self, prompt_name: str | None) -> Reduce:
        """A `Reduce` to [tokens, width]; without a head of their own these are the hidden states."""
        head, tokens = self.model.token_head, self.model.tokens
        query = isinstance(tokens, MultivectorTokens) and tokens.is_query(prompt_name)

        def reduce(part: np.ndarray, encoding: Any) -> np.ndarray:
            refuse_infinite(part, "vector with a value")
            return head.vectors(part, encoding.ids, query) if head else part.copy()

        return reduce

    def embed_hybrid(self, request: EmbedHybridRequest, lane: Lane) -> Pending:
        """All kinds of vectors that are asked for, of one pass."""
        reduces: dict[str, Reduce] = {}
        if request.dense:
            self.require("embedding", does="embed")
            reduces["dense"] = self.dense_vector(self.width_of(request), request.normalize)
        if request.sparse:
            self.require("sparse", does="embed_sparse")
            reduces["sparse"] = self.sparse_entries
        if request.tokens:
            self.require("embedding", "multivector", does="embed_all")
            reduces["tokens"] = self.token_vectors(prompt_name_of(request))
        if not reduces:
            raise validation("nothing is asked for: set dense, sparse or tokens")

        def reduce(part: np.ndarray, encoding: Any) -> dict[str, np.ndarray]:
            return {kind: each(part, encoding) for kind, each in reduces.items()}

        def finish(rows: list[Any], times: bytes) -> bytes:
            found = rows[0]
            dense = pack(found["dense"]) if "dense" in found else b""
            sparse = EmbedHybridResponse(sparse_embeddings=sparse_values(found["sparse"]) if "sparse" in found else ())
            tokens = b"".join(length_delimited(3, pack(vector)) for vector in found.get("tokens", ()))
            return dense + sparse.SerializeToString() + tokens + length_delimited(4, times)

        return self.one_text("embed", request, lane, finish, reduce)

    def embed_image(self, request: EmbedImageRequest, lane: Lane) -> Pending:
        """A vector in the space of the texts."""
        if not self.model.images:
            words = f"Backend error: `embed_image` is not available: {self.card.architecture} takes no images"
            raise Problem(Kind.PRECONDITION, "MODEL_TYPE", words)
        width, normalize = self.width_of(request), request.normalize or not request.HasField("normalize")

        def reduce(part: np.ndarray, encoding: Any) -> np.ndarray:
            refuse_infinite(part, "vector with a value")
            return unit(part[:width]) if normalize else part[:width].copy()

        def finish(rows: list[np.ndarray], times: bytes) -> bytes:
            return pack(rows[0]) + length_delimited(2, times)

        pending = Pending("embed", finish, characters=0)
        pending.jobs.append(self.model.submit_image(lane, request.image, reduce))
        return pending

    # -- scores -----------------------------------------------------------------------------------------------------

    def predict(self, request: tei.PredictRequest, lane: Lane) -> Pending:
        self.require("classifier", "reranker", does="predict")
        return self.one_text("predict", request, lane, self.predictions(request.raw_scores))

    def predict_pair(self, request: tei.PredictPairRequest, lane: Lane) -> Pending:
        self.require("classifier", "reranker", does="predict")
        if len(request.inputs) not in (1, 2):
            raise validation(f"`inputs` must have one or two texts. Given: {len(request.inputs)}")
        text: Text = request.inputs[0] if len(request.inputs) == 1 else (request.inputs[0], request.inputs[1])
        pending = Pending("predict", self.predictions(request.raw_scores), characters=sum(map(len, request.inputs)))
        pending.jobs.append(self.model.submit(lane, text, whole, request.truncate, self.left(request)))
        return pending

    def predictions(self, raw: bool) -> Finish:
        def finish(rows: list[np.ndarray], times: bytes) -> bytes:
            refuse_infinite(rows[0], "score")
            scores = rows[0] if raw else probabilities(rows[0])
            ranked = [tei.Prediction(score=scores[at], label=self.card.labels[at]) for at in descending(scores)]
            return tei.PredictResponse(predictions=ranked).SerializeToString() + length_delimited(2, times)

        return finish

    def rerank(self, request: tei.RerankRequest, lane: Lane) -> Pending:
        if not request.texts:
            raise validation("`texts` cannot be empty")
        self.require("reranker", "multivector", does="rerank")
        most = self.max_client_batch_size
        if len(request.texts) > most:
            raise invalid(f"batch size {len(request.texts)} > maximum allowed batch size {most}", "BATCH_SIZE")
        return self.ranked(request.query, list(request.texts), request, lane)

    def ranked(self, query: str, texts: list[str], request: Any, lane: Lane) -> Pending:
        """Scores of ``texts`` against ``query``, with the request's options. index: the position in ``texts``."""
        compares = "multivector" in self.card.tasks

        def finish(rows: list[np.ndarray], times: bytes) -> bytes:
            scores = late_scores(rows, request.raw_scores) if compares else pair_scores(rows, request.raw_scores)
            refuse_infinite(scores, "score")
            ranks = [
                tei.Rank(index=at, text=texts[at] if request.return_text else None, score=scores[at])
                for at in descending(scores)
            ]
            return tei.RerankResponse(ranks=ranks).SerializeToString() + length_delimited(2, times)

        pending = Pending("predict", finish, characters=sum(len(query) + len(text) for text in texts))
        left = self.left(request)
        # A head beside others, as BGE-M3's, treats queries and documents alike.
        asks, is_asked = (QUERY, DOCUMENT) if isinstance(self.model.tokens, MultivectorTokens) else (None, None)
        try:
            if compares:
                reduce = self.token_vectors(asks)
                pending.jobs.append(self.model.submit(lane, query, reduce, request.truncate, left, asks))
            for text in texts:
                if compares:
                    reduce = self.token_vectors(is_asked)
                    job = self.model.submit(lane, text, reduce, request.truncate, left, is_asked)
                else:
                    job = self.model.submit(lane, (query, text), whole, request.truncate, left)
                pending.jobs.append(job)
        except BaseException:
            pending.cancel()
            raise
        return pending

    # -- the tokenizer ----------------------------------------------------------------------------------------------

    def tokenize(self, request: tei.EncodeRequest) -> tei.EncodeResponse:
        prompt = request.prompt_name if request.HasField("prompt_name") else None
        tokens = self.model.tokens.tokenize(request.inputs, request.add_special_tokens, prompt)
        return tei.EncodeResponse(tokens=[tei.SimpleToken(**token._asdict()) for token in tokens])

    def decode(self, request: tei.DecodeRequest) -> tei.DecodeResponse:
        if not request.ids:
            raise validation("`ids` cannot be empty")
        return tei.DecodeResponse(text=self.model.tokens.decode(list(request.ids), request.skip_special_tokens))

    # -- shared -----------------------------------------------------------------------------------------------------

    def one_text(
        self,
        kind: str,
        request: Any,
        lane: Lane,
        finish: Finish,
        reduce: Reduce = whole,
        pooling: str | None = None,
    ) -> Pending:
        pending = Pending(kind, finish, characters=len(request.inputs))
        name = prompt_name_of(request) if kind == "embed" else None
        left = self.left(request)
        pending.jobs.append(self.model.submit(lane, request.inputs, reduce, request.truncate, left, name, pooling))
        return pending

    def left(self, request: Any) -> bool:
        if request.truncation_direction not in DIRECTIONS:
            raise validation(f"unknown truncation_direction {request.truncation_direction}: 0 is right, 1 is left")
        return bool(request.truncation_direction == LEFT)

    def require(self, *tasks: str, does: str) -> None:
        """Raises: Problem (precondition) unless the model does one of ``tasks``."""
        if self.card.tasks.isdisjoint(tasks):
            kind = {"embedding": "an embedding", "sparse": "a splade"}.get(self.card.task, f"a {self.card.task}")
            message = f"Backend error: `{does}` is not available: {self.card.architecture} is {kind} model"
            raise Problem(Kind.PRECONDITION, "MODEL_TYPE", message)


def prompt_name_of(request: Any) -> str | None:
    return request.prompt_name if request.HasField("prompt_name") else None


def sparse_values(entries: np.ndarray) -> list[tei.SparseValue]:
    """[words] of ENTRY as messages."""
    pairs = zip(entries["index"].tolist(), entries["value"].tolist(), strict=True)
    return [tei.SparseValue(index=index, value=value) for index, value in pairs]


def pair_scores(rows: list[np.ndarray], raw: bool) -> np.ndarray:
    """[texts]: of a reranker's scores, one for each text. Raises: Problem before an infinite one becomes 1 or 0."""
    refuse_infinite(np.concatenate(rows), "score")
    return np.concatenate(rows if raw else [probabilities(row) for row in rows])


def late_scores(rows: list[np.ndarray], raw: bool) -> np.ndarray:
    """[texts]: MaxSim of the query's vectors, the first row, with those of each text; its mean over them unless raw."""
    query, *documents = rows
    scores = np.array([maxsim(query, document) for document in documents], np.float32)
    return scores if raw else scores / np.float32(len(query))


def refuse_infinite(values: np.ndarray, what: str) -> None:
    if not np.isfinite(values).all():
        raise backend(f"the model gave a {what} that is not a finite number")


def unit(vector: np.ndarray) -> np.ndarray:
    try:
        return normalized(vector)
    except ArithmeticError:
        refuse_infinite(vector, "vector with a value")
        raise backend("the model gave a vector of zeros, which cannot be normalized") from None
