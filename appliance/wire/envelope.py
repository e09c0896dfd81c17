"""The envelope of a `TeiMultiplexer` request: its target, and TEI's own request as opaque bytes."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from appliance.core.problems import invalid
from appliance.core.routing import Target
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Envelope
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Target as TargetMessage


def unwrap(raw: bytes) -> tuple[Target | None, bytes | None]:
    """(target, inner request) of any request message of `TeiMultiplexer`; None for a part that was not sent.

    Raises: Problem when the bytes are no such message. A plain tuple: this runs once for each call.
    """
    try:
        envelope = Envelope.FromString(raw)
    except DecodeError:
        raise invalid("The request is not a message of tei_multiplexer.v1") from None
    target = target_from_message(envelope.target) if envelope.HasField("target") else None
    return target, envelope.request if envelope.HasField("request") else None


def target_from_message(message: TargetMessage) -> Target | None:
    """The target in a message; None when it has none."""
    kind = message.WhichOneof("routing")
    return Target(**{kind: getattr(message, kind)}) if kind else None


INSTANCE_KEY, MODEL_KEY = "x-tei-instance", "x-tei-model"
HOP_KEY = "x-tei-hop"  # request metadata, of another appliance: it has asked us, and we ask nobody else
# Request metadata that Envoy sets, whatever the caller sent: judge him; or he is the gateway, which has done so; or the
# call was admitted to the lane.
EXPRESS_KEY, EXPRESS_JUDGE, EXPRESS_INSIDE, EXPRESS_ADMITTED = "x-tei-express", "judge", "inside", "admitted"
EXPRESS_OUTSIDE = "outside"  # likewise, of the multiplexer to its server of grpcio: the call came through the port
CERTIFICATE_KEY = "x-forwarded-client-cert"  # of the caller, from Envoy
# Trailing metadata to Envoy, in its words: it would try a call again that was refused as exhausted or unavailable.
FINAL = ("x-envoy-ratelimited", "true")
EXPRESS_SECS_KEY = "x-tei-express-secs"  # reply metadata to Envoy: for how long it may admit the caller without asking
ON_ERROR_KEY, NULL_ROWS = "x-arrow-on-error", "null"  # request metadata of an Arrow call: failed rows are null
ROW_KEY = "x-arrow-error-row"  # trailing metadata of an Arrow call: the row that failed it
CACHE_KEY = "x-tei-cache"  # of a request: what its caller says about the cache; of a reply: hit, miss, bypass or counts
CACHE_HIT, CACHE_MISS, CACHE_BYPASS = "hit", "miss", "bypass"  # the last is neither read nor written
FINGERPRINT_KEY = "x-tei-fingerprint"  # reply metadata: of the model that computed the vectors
EXPECT_KEY = "x-tei-expect-fingerprint"  # request metadata: other vectors do not fit the caller's index
SCOPE_KEY = (
    "x-tei-scope"  # request metadata, of the gateway and of our own interceptor alone: whose entries may be used
)
# Request metadata of a stream: its replies belong together, and are of one generation of the instance. In place of yes:
# what the reply metadata of another stream said, to whose replies these belong, too.
WHOLE_KEY, IS_WHOLE = "x-tei-whole", "yes"
GENERATIONS_KEY = "x-tei-generations"
# Request metadata of an Arrow call: its rows are single texts of several callers, so they take the permits of such, or
# the call is refused; what each row cost comes back as trailing metadata (`wire/rowusage.py`).
COMBINED_KEY, IS_COMBINED = "x-tei-combined", "yes"
ROW_USAGE_KEY = "x-tei-row-usage"
LANE_KEY, SINGLE_LANE = "x-tei-lane", "single"  # request metadata to the embedded engine: a stream of such texts
WAIT_KEY, DO_NOT_WAIT = "x-tei-wait", "no"  # request metadata: refuse at once where no replica is ready
RETRY_KEY = "retry-after-ms"  # trailing metadata of refusals for lack of capacity
CODE_KEY = "x-tei-code"  # trailing metadata of the multiplexer's own refusals: the Problem's code; TEI sends none
REPLICA_UNAVAILABLE = "REPLICA_UNAVAILABLE"  # the code of what ends so because of a replica, which had the call in work


def target_from_metadata(metadata: dict[str, str]) -> Target | None:
    """The target of an unmodified TEI client, from its request metadata."""
    here = HOP_KEY in metadata
    if INSTANCE_KEY in metadata:
        return Target(instance_name=metadata[INSTANCE_KEY], here=here)
    if MODEL_KEY in metadata:
        return Target(model_id=metadata[MODEL_KEY], here=here)
    return None
