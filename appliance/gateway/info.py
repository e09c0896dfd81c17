"""TEI's `/info` and `/health`, and why an instance does not answer."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.core.problems import Problem
from appliance.core.state import Instance
from appliance.drivers import hub, modelfolder
from appliance.gateway import answers
from appliance.gateway.choosing import Choice
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.tei import told_info
from appliance.node import overview
from appliance.node.context import Node
from appliance.wire.tei.v1 import tei_pb2 as tei

SLOWEST_RETRY_SECS = 10


class Info(Resource):
    """All of TEI's keys in TEI's order. gRPC's Info lacks some, which the instance's fields and model folder have."""

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        choice = self.choose(request)
        told = told_info(self, request, choice)
        response.data = answers.dumps(
            {
                "model_id": told.model_id,
                "model_sha": told.model_sha if told.HasField("model_sha") else None,
                "model_dtype": told.model_dtype,
                "served_model_name": choice.flag("--served-model-name") or told.model_id,
                "model_type": model_type(told, choice.first),
                "max_concurrent_requests": told.max_concurrent_requests,
                "max_input_length": told.max_input_length,
                "max_batch_tokens": told.max_batch_tokens,
                "max_batch_requests": told.max_batch_requests if told.HasField("max_batch_requests") else None,
                "max_client_batch_size": told.max_client_batch_size,
                "auto_truncate": choice.auto_truncate,
                "tokenization_workers": told.tokenization_workers,
                "version": told.version,
                "sha": told.sha if told.HasField("sha") else None,
                "docker_label": told.docker_label if told.HasField("docker_label") else None,
            }
        )

    on_head = on_get


def model_type(told: tei.InfoResponse, instance: Instance) -> dict[str, Any]:
    spec = instance.spec
    try:
        card = modelfolder.read_card(hub.find(spec.model_id, spec.revision), spec.pooling)
        pooling, labels = card.pooling, card.labels
    except Problem:  # TEI found the model elsewhere than we look
        pooling, labels = spec.pooling or "cls", ()
    if told.model_type == tei.MODEL_TYPE_EMBEDDING:
        return {"embedding": {"pooling": pooling.replace("-", "_")}}
    kind = "classifier" if told.model_type == tei.MODEL_TYPE_CLASSIFIER else "reranker"
    numbered = dict(enumerate(labels))
    return {
        kind: {
            "id2label": {str(number): label for number, label in numbered.items()},
            "label2id": {label: number for number, label in numbered.items()},
        }
    }


class Health(Resource):
    """200 and nothing else while the instance answers; without one named among several, while the multiplexer does.

    Strangers, where it is open to them, are told neither why nor of whom.
    """

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        try:
            self.ask(request)
        except Refusal:
            if request.context.stranger:
                request.context.choice = None
                words = "It does not answer; who shows a key is told why"
                raise Refusal(Reason.UNAVAILABLE, words) from None
            raise
        response.status = 200

    on_head = on_get

    def ask(self, request: falcon.Request) -> None:
        several = len(self.gateway.chooser.instances) != 1
        named = request.context.instance or request.get_header("X-TEI-Instance") or request.get_header("X-TEI-Model")
        if several and not named:
            self.gateway.upstream.check()
        else:
            told_info(self, request, self.choose(request))


def explained(refusal: Refusal, node: Node, choice: Choice) -> Refusal:
    """An instance that is not ready: since when it loads, or why it failed."""
    try:
        found = overview.show(node, choice.first.name)
    except Problem:
        return refusal
    name, status = found["name"], found["status"]
    if status == "starting":
        elapsed = max((replica["uptime_secs"] or 0 for replica in found["replica_list"]), default=0)
        retry_ms = int(1000 * min(SLOWEST_RETRY_SECS, max(1.0, elapsed / 2)))
        longest = found["startup_timeout_secs"]
        message = f'Instance "{name}" is still loading its model: {elapsed:.0f} s so far, at most {longest} s'
        return Refusal(Reason.UNAVAILABLE, message, retry_ms, refusal.code)
    if status == "failed":
        return Refusal(Reason.UNAVAILABLE, f'Instance "{name}" has failed: {found["last_error"]}', None, refusal.code)
    return refusal
