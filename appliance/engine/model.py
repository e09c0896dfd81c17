"""One loaded model: texts in, jobs out. It joins the folder, the tokenizer, the queue and the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from appliance.core.problems import invalid
from appliance.drivers.cores import AllCores, Core
from appliance.drivers.modelfolder import Card, read_card
from appliance.engine.batching import CPU_TOKENS, LengthQueue
from appliance.engine.heads import sparse_head, token_head
from appliance.engine.images import ImageReader
from appliance.engine.intake import Intake, Lane, Permits
from appliance.engine.metrics import KINDS, EngineMetrics
from appliance.engine.pooling import dense_layers
from appliance.engine.runtime import ImageRuntime, Runtime
from appliance.engine.special_tokens import AdapterTokens, ChatTokens, FilledTokens, MultivectorTokens
from appliance.engine.tokens import Text, TextInput, Tokens, attempted
from appliance.engine.worker import InferenceWorker, Reduce, TextJob, whole
from appliance.node.servable import refuse_unknown_prompt

UNBOUNDED = 2**31
# Threads that compute have a lower priority than processes that pass texts on or refuse them: at equal priority a full
# multiplexer took 80 to 170 ms to refuse instead of 15. Batches have a lower one than single texts. On an idle machine
# this costs nothing.
SINGLE_NICE, BATCH_NICE = 5, 10


class LoadedModel:
    """The model of one engine process. Loading it raises a Problem that says what is wrong with it.

    by_length False: batches in order of arrival, as TEI makes them (for comparison). cores: the files by which engines
    lease the cores of this machine; empty: the threads are this engine's alone.
    """

    def __init__(
        self,
        folder: Path,
        graphs: Path,
        threads: int,
        pooling: str | None = None,
        max_batch_tokens: int = 16384,
        max_batch_requests: int | None = None,
        max_concurrent_requests: int = 512,
        default_prompt: str | None = None,
        default_prompt_name: str | None = None,
        by_length: bool = True,
        runtime: str = "onnxruntime",
        dtype: str | None = None,
        cores: Sequence[Path] = (),
    ) -> None:
        self.card = read_card(folder, pooling)
        self.max_tokens = min(self.card.max_tokens, max_batch_tokens)
        if default_prompt_name is not None:
            refuse_unknown_prompt(default_prompt_name, self.card)
            default_prompt = self.card.prompts[default_prompt_name]
        self.tokens = tokens_for(self.card, self.max_tokens, default_prompt, default_prompt_name)
        self.dense = dense_layers(self.card)
        self.token_head = token_head(self.card, self.dense, self.tokens.tokenizer)
        self.sparse_head = sparse_head(self.card, self.tokens.tokenizer)
        self.runtime = Runtime(self.card, graphs, threads, runtime, dtype, side_by_side=by_length, spin=bool(cores))
        budget = min(CPU_TOKENS, max_batch_tokens) if self.runtime.on_cpu else max_batch_tokens
        self.metrics = EngineMetrics(self.max_tokens, kinds_of(self.card.tasks))
        self.healthy = True
        shared = cores if self.runtime.on_cpu else ()
        all_cores = AllCores(shared) if shared else None

        def workers(runtime: Runtime) -> dict[bool, InferenceWorker]:
            """Of single texts or images, and of those of streams."""
            at_once, on_cpu = runtime.at_once, runtime.on_cpu
            return {
                single: InferenceWorker(
                    runtime,
                    LengthQueue(
                        budget, max_batch_requests or UNBOUNDED, by_length, at_once if on_cpu else 1, on_gpu=not on_cpu
                    ),
                    self.metrics,
                    self.note_result,
                    threads=at_once,
                    nice=SINGLE_NICE if single else BATCH_NICE,
                    # Single texts wait for no core: the kernel shares them, and prefers these threads.
                    cores=[] if single else [Core(path) for path in shared[:at_once]],
                    all_cores=all_cores if single else None,
                    inline=single,
                )
                for single in (True, False)
            }

        self.workers = workers(self.runtime)
        self.texts = Intake(self.tokens.encode_all, self.workers, self.metrics)
        self.images: ImageReader | None = None
        if self.card.images:
            image_runtime = ImageRuntime(self.card, graphs, threads, runtime, dtype, by_length, spin=bool(cores))
            self.image_workers = workers(image_runtime)
            self.images = reader = ImageReader(self.card.images, patches_of(self.card))
            self.pictures = Intake(
                lambda given: [attempted(partial(reader.read, raw)) for raw in given], self.image_workers, self.metrics
            )
        self.permits = Permits(max_concurrent_requests)
        self.on_health: Callable[[bool], None] = lambda ok: None
        self.warm_up()

    def warm_up(self) -> None:
        """One real forward pass before the port opens. Raises: Problem when the model cannot compute."""
        encoding = self.tokens.run(self.tokens.tokenizer, "warm")
        width = int(computed_by(self.workers[True], encoding).shape[-1])
        self.width = len(self.dense[-1].weight) if self.dense else width
        if self.images:
            other = len(computed_by(self.image_workers[True], self.images.blank()))
            if other != self.width:
                raise invalid(f"The vectors of images have {other} numbers and those of texts {self.width}")
        if self.card.task in ("reranker", "classifier") and width != len(self.card.labels):
            raise invalid(f"The model gives {width} scores but config.json names {len(self.card.labels)} labels")

    def note_result(self, ok: bool) -> None:
        """TEI's health of the model: whether its last batch could be computed."""
        if ok != self.healthy:
            self.healthy = ok
            self.on_health(ok)

    def submit(
        self,
        lane: Lane,
        text: Text,
        reduce: Reduce,
        truncate: bool,
        left: bool,
        prompt_name: str | None = None,
        pooling: str | None = None,
    ) -> TextJob:
        """Tokenized as the lane says, computed in its worker; the permit is released when the text is done. pooling: as
        of `TextJob`. Raises: Problem."""
        return self.queue(self.texts, lane, TextInput(text, truncate, left, prompt_name), reduce, pooling)

    def submit_image(self, lane: Lane, raw: bytes, reduce: Reduce) -> TextJob:
        """As a text. Raises: Problem for what is no image."""
        return self.queue(self.pictures, lane, raw, reduce)

    def queue(self, intake: Intake, lane: Lane, given: Any, reduce: Reduce, pooling: str | None = None) -> TextJob:
        lane.acquire()
        job = TextJob(None, reduce, pooling, release=self.permits.release)
        lane.submit(intake, given, job)
        return job


def computed_by(worker: InferenceWorker, encoding: Any) -> np.ndarray:
    """The output for one text that needs no permit. Raises: Problem."""
    job = TextJob(encoding, whole)
    worker.submit([job])
    output: np.ndarray = job.outcome.result()
    return output


def kinds_of(tasks: frozenset[str]) -> list[str]:
    """Of the inputs that a model answers. Late interaction ranks by its vectors."""
    scores = {"classifier", "reranker"}
    fits = {"embed": tasks - scores, "predict": tasks & {*scores, "multivector"}}
    return [kind for kind in KINDS if fits[kind]]


def patches_of(card: Card) -> int:
    """How many tokens an image is to the model."""
    own = card.config.get("vision_config") or {}
    return int((own.get("image_size", 224) // own.get("patch_size", 32 if card.model_type == "clip" else 16)) ** 2)


def tokens_for(card: Card, max_tokens: int, prompt: str | None, prompt_name: str | None) -> Tokens:
    """prompt: the default one, and its name where it has one."""
    if card.multivector:
        return MultivectorTokens(card, card.multivector, max_tokens, prompt_name)
    if card.adapters:
        return AdapterTokens(card, max_tokens, prompt, prompt_name)
    if card.images and card.model_type == "siglip":
        return FilledTokens(card, max_tokens, prompt)
    if card.chat_template:
        return ChatTokens(card, max_tokens, prompt)
    return Tokens(card, max_tokens, prompt)
