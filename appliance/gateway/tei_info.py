"""TEI's `/info` and `/health`, and why an instance does not answer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import falcon

from appliance.core.problems import Problem
from appliance.core.state import Instance
from appliance.gateway import multiplexer_replies, responses
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.selection import Selection
from appliance.node import overview
from appliance.node.context import Node
from appliance.node.servable import card_of
from appliance.wire.envelope import REPLICA_UNAVAILABLE
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

SLOWEST_RETRY_SECS = 10


def fetch_info(resource: Resource, request: falcon.Request, selection: Selection) -> tei.InfoResponse:
    """What the instance says of itself and its model over gRPC."""
    message = mux.InfoRequest(target=selection.target).SerializeToString()
    (reply,) = resource.calls(request, selection).replies("Info", [message], is_aid=True)
    info: tei.InfoResponse = multiplexer_replies.message("Info", tei.InfoResponse, reply)
    return info


class TeiInfoResource(Resource):
    """All of TEI's keys in TEI's order. gRPC's Info lacks some, which the instance's fields and model folder have."""

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        selection = self.select(request)
        info = fetch_info(self, request, selection)
        response.data = responses.dumps(
            {
                "model_id": info.model_id,
                "model_sha": info.model_sha if info.HasField("model_sha") else None,
                "model_dtype": info.model_dtype,
                "served_model_name": selection.flag("--served-model-name") or info.model_id,
                "model_type": model_type(info, selection.first),
                "max_concurrent_requests": info.max_concurrent_requests,
                "max_input_length": info.max_input_length,
                "max_batch_tokens": info.max_batch_tokens,
                "max_batch_requests": info.max_batch_requests if info.HasField("max_batch_requests") else None,
                "max_client_batch_size": info.max_client_batch_size,
                "auto_truncate": selection.auto_truncate,
                "tokenization_workers": info.tokenization_workers,
                "version": info.version,
                "sha": info.sha if info.HasField("sha") else None,
                "docker_label": info.docker_label if info.HasField("docker_label") else None,
            }
        )


def model_type(info: tei.InfoResponse, instance: Instance) -> dict[str, Any]:
    card = card_of(instance.spec)
    pooling, labels = (card.pooling, card.labels) if card else (instance.spec.pooling or "cls", ())
    if info.model_type == tei.MODEL_TYPE_EMBEDDING:
        return {"embedding": {"pooling": pooling.replace("-", "_")}}
    kind = "classifier" if info.model_type == tei.MODEL_TYPE_CLASSIFIER else "reranker"
    numbered = dict(enumerate(labels))
    return {
        kind: {
            "id2label": {str(number): label for number, label in numbered.items()},
            "label2id": {label: number for number, label in numbered.items()},
        }
    }


class TeiHealthResource(Resource):
    """200 and an empty body while the instance answers, or sleeps: then the next call wakes it. Where several instances
    exist and the request names none, 200 while the multiplexer answers. Nobody is woken by it, or waited for.

    Where this route is open to callers without a key, they learn neither the reason nor the instance.
    """

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        try:
            self.check(request)
        except Refusal:
            if request.context.stranger:
                request.context.selection = None
                words = "It does not answer; who shows a key is told why"
                raise Refusal(Reason.UNAVAILABLE, words) from None
            raise
        response.status, response.content_type = 200, falcon.MEDIA_TEXT

    def check(self, request: falcon.Request) -> None:
        several = len(self.gateway.selector.instances) != 1
        name = request.context.instance or request.get_header("X-TEI-Instance") or request.get_header("X-TEI-Model")
        if several and not name:
            self.gateway.channels.check()
        else:
            selection = self.select(request)
            if not is_asleep(self.gateway.node, selection):
                fetch_info(self, request, selection)


def is_asleep(node: Node, selection: Selection) -> bool:
    """Whether the next call wakes an instance. Raises: Refusal while none runs, and one is on its way."""
    statuses = set()
    for instance in selection.instances:
        with suppress(Problem):  # one of a peer
            statuses.add(overview.show(node, instance.name).status)
    if "running" not in statuses and not statuses.isdisjoint(("starting", "stopping")):
        raise Refusal(Reason.UNAVAILABLE, f"No replica of {selection.names} is ready yet")
    return "running" not in statuses and "sleeping" in statuses


def explain_unavailable(refusal: Refusal, node: Node, selection: Selection) -> Refusal:
    """The refusal with what is known of an instance that is not ready: how long it has loaded, or why it failed."""
    try:
        instance = overview.show(node, selection.first.name)
    except Problem:
        return refusal
    name, status = instance.name, instance.status
    if status == "starting":
        elapsed = max((replica.uptime_secs or 0 for replica in instance.replicas), default=0)
        retry_secs = min(SLOWEST_RETRY_SECS, max(1.0, elapsed / 2))
        before = ""
        if instance.load_secs is not None:
            retry_secs = max(1.0, instance.load_secs - elapsed)
            before = f", {instance.load_secs:.0f} s the last time"
        retry_ms = refusal.retry_after_ms or int(1000 * retry_secs)
        longest = instance.startup_timeout_secs
        message = f'Instance "{name}" is still loading its model: {elapsed:.0f} s so far{before}, at most {longest} s'
        if refusal.code == REPLICA_UNAVAILABLE:  # it had the call in work, and loads since
            message = refusal.message
        return Refusal(Reason.UNAVAILABLE, message, retry_ms, refusal.code)
    if status == "downloading":
        progress = instance.progress
        so_far = f": {progress.bytes_done} of {progress.bytes_total} bytes" if progress and progress.bytes_total else ""
        message = f'Instance "{name}" is downloading its model{so_far}'
        return Refusal(Reason.UNAVAILABLE, message, 1000 * SLOWEST_RETRY_SECS, refusal.code)
    if status == "failed":
        message = f'Instance "{name}" has failed: {instance.last_error}'
        return Refusal(Reason.UNAVAILABLE, message, None, refusal.code)
    return refusal
