"""Hybrid: dense, sparse and token vectors of one text, of one instance or of several, at once and by one deadline.

Legs of one target go to one replica in one pass, where that is an engine of ours; else each is a call of its own,
beside the others: in the thread of the call, and in one of its own only where it has to wait for more than a reply. A
leg that fails ends all of them, unless the caller takes a partial answer: then its result says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from appliance.core.problems import Kind, Problem, invalid
from appliance.core.routing import Target, missing_target
from appliance.drivers.grpccalls import CODES, abort
from appliance.drivers.memory import Reservation
from appliance.multiplexer.caller import time_left
from appliance.multiplexer.collectors import reply_too_large
from appliance.multiplexer.cooperation import Scheduler, WouldBlock
from appliance.multiplexer.joined_call import CallEnded, PartOfCall
from appliance.multiplexer.metering import CallRecord
from appliance.multiplexer.relay import RefusalsAsStatus, Relay
from appliance.multiplexer.threads import WorkerThreads
from appliance.wire import vectors
from appliance.wire.envelope import target_from_message
from appliance.wire.methods import HYBRID, METHODS, Method
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2 import EmbedHybridRequest, EmbedHybridResponse
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

MOST_LEGS = 16
THREADS = 1536  # legs that wait for more than a reply: more than may wait for replicas, and take threads from others
PARTIAL_SHARE = 0.9  # of the time left, for a leg of a partial answer
MOST_KNOWN = 1024
COPIES = 4  # of a leg's reply: as it came, by its fields, in the answer, as bytes of that
DENSE, SPARSE, TOKENS = mux.HYBRID_OUTPUT_DENSE, mux.HYBRID_OUTPUT_SPARSE, mux.HYBRID_OUTPUT_TOKENS
# What each output is at a replica that has only TEI's calls: the method, its messages.
CALLS: dict[int, tuple[Method, Any, Any]] = {
    output: (next(method for method in METHODS if method.name == name), request, reply)
    for output, name, request, reply in (
        (DENSE, "Embed", tei.EmbedRequest, tei.EmbedResponse),
        (SPARSE, "EmbedSparse", tei.EmbedSparseRequest, tei.EmbedSparseResponse),
        (TOKENS, "EmbedAll", tei.EmbedAllRequest, tei.EmbedAllResponse),
    )
}
FIELDS = {name: field.number for name, field in mux.HybridResult.DESCRIPTOR.fields_by_name.items()}
# Of each reply: the number that a field has in the result of a leg, by the one that it has there.
NUMBERS = {
    reply: {field.number: FIELDS[field.name] for field in reply.DESCRIPTOR.fields}
    for reply in (EmbedHybridResponse, *(reply for _, _, reply in CALLS.values()))
}
PASS = {name: field.number for name, field in EmbedHybridResponse.DESCRIPTOR.fields_by_name.items()}
IN_ONE_PASS = {DENSE: PASS["embeddings"], SPARSE: PASS["sparse_embeddings"], TOKENS: PASS["token_embeddings"]}
APART = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)  # what one pass cannot do
OF_ONE_LEG = (grpc.StatusCode.INVALID_ARGUMENT, "VALIDATION_ERROR")  # it may be: the others are answered then


class LegCall(PartOfCall):
    """One leg of a call."""

    def __init__(self, whole: HybridCall, scheduler: Scheduler | None) -> None:
        super().__init__(whole.context, scheduler)
        self.whole = whole

    def is_active(self) -> bool:
        return not self.whole.over and self.whole.context.is_active()

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        return self.whole.add_callback(callback)

    def time_remaining(self) -> float | None:
        left = time_left(self.whole.context)
        return left * PARTIAL_SHARE if left is not None and self.whole.partial else left


class HybridCall:
    """One call, of which all legs end when it does. reservation: of its memory; largest: bytes of its reply."""

    def __init__(self, context: grpc.ServicerContext, partial: bool, reservation: Reservation, largest: int) -> None:
        self.context, self.partial = context, partial
        self.reservation, self.largest, self.size = reservation, largest, 0
        self.over = False
        self.failure: BaseException | None = None  # the first one; others may have failed because of it
        self.part_failure: CallEnded | Problem | None = None  # that of a leg, which the caller may take
        self.callbacks: list[Callable[[], Any]] = []
        self.lock = threading.Lock()
        if not context.add_callback(self.end):
            self.end()

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        with self.lock:
            if not self.over:
                self.callbacks.append(callback)
            return not self.over

    def fail(self, failure: BaseException | None) -> None:
        """Of some legs, if they failed: the others end, too."""
        if failure:
            self.failure = self.failure or failure
            self.end()

    def part_failed(self, failure: CallEnded | Problem, results: Sequence[Any]) -> bool:
        """Let these results say why they failed, if the caller takes a partial answer; whether he does."""
        takes_it = self.partial and self.context.is_active()
        self.part_failure = self.part_failure or failure
        for each in results if takes_it else ():
            each.error.CopyFrom(error_of(failure))
        return takes_it

    def book(self, reply: bytes) -> None:
        """A leg's part of the answer. Raises: Problem when all of them are too large for one message, or for memory."""
        with self.lock:
            self.size += len(reply)
            if self.size > self.largest:
                raise reply_too_large(self.size, self.largest, "fewer legs")
        self.reservation.grow(COPIES * len(reply), bounded=False)

    def end(self) -> None:
        with self.lock:
            self.over = True
            callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class Group(NamedTuple):
    """Legs of one target that differ in nothing but their outputs; places: theirs among the legs of the call."""

    target: Target
    places: list[int]
    legs: list[Any]


class HybridHandler:
    """The handler of `Hybrid`."""

    def __init__(self, relay: Relay, max_message_bytes: int) -> None:
        self.relay, self.largest = relay, max_message_bytes
        self.threads = WorkerThreads(THREADS, "hybrid")
        self.permits = threading.BoundedSemaphore(THREADS)
        self.apart: set[Any] = set()  # targets, each with its generation, whose replicas have TEI's calls alone

    def handler(self) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.handle)

    def handle(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        with self.relay.metering.counting("Hybrid", context) as call, RefusalsAsStatus(context):
            try:
                request = mux.HybridRequest.FromString(raw)
            except DecodeError:
                raise invalid("The request is not a HybridRequest of tei_multiplexer.v1") from None
            groups = [part for group in groups_of(request) for part in self.parts(group)]
            call.target, call.texts = groups[0].target, 1
            with self.relay.reserve.reservation() as reservation:
                whole = HybridCall(context, request.partial, reservation, self.largest)
                try:
                    reply: bytes = self.answer(whole, request, groups, call).SerializeToString()
                except CallEnded as ended:
                    abort(context, ended.code, ended.details, ended.trailing)
                finally:
                    whole.end()
                return reply

    def parts(self, group: Group) -> list[Group]:
        """Each leg for itself, where it is known that one pass cannot be had."""
        if len(group.legs) == 1 or self.generation(group.target) not in self.apart:
            return [group]
        return [Group(group.target, [place], [leg]) for place, leg in zip(group.places, group.legs, strict=True)]

    def generation(self, target: Target) -> Any:
        return target, self.relay.pool.generations(target)

    def answer(self, whole: HybridCall, request: Any, groups: list[Group], call: CallRecord) -> Any:
        """Raises: CallEnded, Problem."""
        response = mux.HybridResponse()
        results = [response.results.add() for _ in request.legs]  # in their place: to put them there later copies all
        records = [CallRecord(group.target) for group in groups]
        scheduler = Scheduler() if len(groups) > 1 else None
        passes: list[int] = []
        runs: list[Future[int]] = []

        def start(group: Group, record: CallRecord) -> None:
            work = partial(self.run, whole, request, group, results, record)
            mine = [results[place] for place in group.places]
            try:
                passes.append(work(scheduler))
            except WouldBlock:
                for result in mine:
                    result.Clear()
                try:
                    runs.append(run := self.submit(partial(work, None)))
                    run.add_done_callback(lambda run: whole.fail(run.exception()))
                except Problem as failure:
                    if not whole.part_failed(failure, mine):
                        whole.fail(failure)
            except (CallEnded, Problem) as failure:
                whole.fail(failure)

        starts = [partial(start, group, record) for group, record in zip(groups, records, strict=True)]
        with call.waiting():
            if scheduler:
                scheduler.run(starts)
            else:
                starts[0]()
            for run in runs:
                whole.fail(run.exception())
            if whole.failure:
                raise whole.failure
            response.passes = sum(passes) + sum(run.result() for run in runs)
        call.instance = records[0].instance
        if whole.part_failure and all(result.HasField("error") for result in results):
            raise whole.part_failure
        return response

    def submit(self, work: Callable[[], int]) -> Future[int]:
        """Run it in a thread, at once: no leg waits for one beyond its time. Raises: Problem exhausted."""
        if not self.permits.acquire(blocking=False):
            raise Problem(Kind.EXHAUSTED, "QUEUE_FULL", f"{THREADS} legs of Hybrid calls wait already: try again later")
        return self.threads.begin(work, self.permits.release)

    def run(
        self,
        whole: HybridCall,
        request: Any,
        group: Group,
        results: list[Any],
        record: CallRecord,
        scheduler: Scheduler | None,
    ) -> int:
        """Fill in the results of a group; how many passes that took. Raises: CallEnded, Problem; WouldBlock."""
        context: Any = LegCall(whole, scheduler)
        if len(group.legs) > 1 and (passed := self.together(context, request, group, results, record)):
            return passed
        passes = 0
        for place, leg in zip(group.places, group.legs, strict=True):
            try:
                self.alone(context, request, group.target, leg, results[place], record)
                passes += 1
            except (CallEnded, Problem) as failure:
                if not whole.part_failed(failure, [results[place]]):
                    raise
        return passes

    def together(self, context: Any, request: Any, group: Group, results: list[Any], record: CallRecord) -> int:
        """One pass for all legs; 0 where that cannot be had, and nothing was computed. Raises: CallEnded, Problem."""
        generation = self.generation(group.target)
        outputs = {leg.output for leg in group.legs}
        inner = EmbedHybridRequest(
            **fields_of(request, group.legs[0]),
            **options_of(next((leg for leg in group.legs if leg.output == DENSE), None)),
            dense=DENSE in outputs,
            sparse=SPARSE in outputs,
            tokens=TOKENS in outputs,
        )
        try:
            reply = self.relay.cached.unary(HYBRID, group.target, inner.SerializeToString(), context, record)
            context.whole.book(reply.message)
        except (CallEnded, Problem) as failure:
            code = getattr(failure, "code", None)
            if code not in APART and not (context.whole.partial and code in OF_ONE_LEG):
                if not context.whole.part_failed(failure, [results[place] for place in group.places]):
                    raise
                return 1
            if code is grpc.StatusCode.UNIMPLEMENTED:
                self.apart = {generation} if len(self.apart) > MOST_KNOWN else self.apart | {generation}
            return 0
        parts = readable_parts(EmbedHybridResponse, reply.message, record)
        metadata = parts.get(PASS["metadata"], b"")
        for place, leg in zip(group.places, group.legs, strict=True):
            fill(results[place], parts.get(IN_ONE_PASS[leg.output], b"") + metadata, record)
        return 1

    def alone(self, context: Any, request: Any, target: Target, leg: Any, result: Any, record: CallRecord) -> None:
        """One leg by TEI's own call, with the cache before it. Raises: CallEnded, Problem."""
        method, message, answer = CALLS[leg.output]
        inner = message(**fields_of(request, leg), **(options_of(leg) if leg.output == DENSE else {}))
        reply = self.relay.cached.unary(method, target, inner.SerializeToString(), context, record)
        context.whole.book(reply.message)
        fill(result, b"".join(readable_parts(answer, reply.message, record).values()), record)


def groups_of(request: Any) -> list[Group]:
    """Raises: Problem for legs that cannot be."""
    if not 1 <= len(request.legs) <= MOST_LEGS:
        raise invalid(f"Hybrid needs 1 to {MOST_LEGS} legs, not {len(request.legs)}")
    groups: dict[Any, Group] = {}
    seen: dict[Any, int] = {}
    for place, leg in enumerate(request.legs):
        if leg in request.legs[:place]:
            raise invalid(f"Leg {place} asks for what another leg asks for")
        if leg.output not in CALLS:
            raise invalid(f"Leg {place} asks for the unknown output {leg.output}")
        target = target_from_message(leg.target) if leg.HasField("target") else None
        if target is None:
            raise missing_target()
        alike = (target, leg.prompt_name if leg.HasField("prompt_name") else None)
        again = seen.get((alike, leg.output), 0)  # one output twice, say in two widths, is two passes
        seen[alike, leg.output] = again + 1
        group = groups.setdefault((alike, again), Group(target, [], []))
        group.places.append(place)
        group.legs.append(leg)
    return list(groups.values())


def fields_of(request: Any, leg: Any) -> dict[str, Any]:
    """The fields that the requests of all outputs have."""
    prompt = {"prompt_name": leg.prompt_name} if leg.HasField("prompt_name") else {}
    direction = request.truncation_direction
    return {"inputs": request.inputs, "truncate": request.truncate, "truncation_direction": direction, **prompt}


def options_of(leg: Any) -> dict[str, Any]:
    """Those of a dense vector."""
    if leg is None:
        return {}
    options = {"normalize": leg.normalize if leg.HasField("normalize") else True}
    return options | ({"dimensions": leg.dimensions} if leg.HasField("dimensions") else {})


def readable_parts(answer: Any, raw: bytes, record: CallRecord) -> dict[int, bytes]:
    """What a replica answered, as the fields of a result. Raises: Problem where it cannot be read."""
    try:
        return vectors.parts_of(answer, raw, NUMBERS[answer])
    except DecodeError as error:
        raise unreadable(record, error) from None


def fill(result: Any, content: bytes, record: CallRecord) -> None:
    """content: fields of a result, as a replica answered them. Raises: Problem where they cannot be read."""
    try:
        result.MergeFromString(content)
    except DecodeError as error:
        raise unreadable(record, error) from None
    result.instance = record.instance or ""


def unreadable(record: CallRecord, error: DecodeError) -> Problem:
    words = f'A replica of "{record.instance}" answered, but it cannot be read: {error}'
    return Problem(Kind.INTERNAL, "WRONG_ANSWER", words)


def error_of(failure: CallEnded | Problem) -> Any:
    code = failure.code if isinstance(failure, CallEnded) else CODES[failure.kind]
    return mux.HybridError(code=code.value[0], message=str(failure))
