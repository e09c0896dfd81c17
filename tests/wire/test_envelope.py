"""The envelope: of every request message the target is read and TEI's own request comes out byte for byte."""

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Target
from appliance.wire import envelope
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.vectors import length_delimited
from testing.specs import LAW

REQUESTS = sorted(
    name
    for name, message in mux.DESCRIPTOR.message_types_by_name.items()
    if name.endswith("Request") and set(message.fields_by_name.keys()) == {"target", "request"}
)
SCALARS = {
    FieldDescriptor.CPPTYPE_STRING: st.text(max_size=20),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 1),
}
TARGETS = st.one_of(
    st.text(max_size=20).map(lambda text: {"instance_name": text}),
    st.text(max_size=20).map(lambda text: {"model_id": text}),
    st.integers(0, 2**32 - 1).map(lambda index: {"instance_index": index}),
)


def messages(descriptor: Descriptor) -> st.SearchStrategy[Message]:
    scalars = {
        field.name: st.binary(max_size=20) if field.type == field.TYPE_BYTES else SCALARS[field.cpp_type]
        for field in descriptor.fields
    }
    values = {
        field.name: st.lists(scalars[field.name], max_size=3) if field.is_repeated else scalars[field.name]
        for field in descriptor.fields
    }
    return st.fixed_dictionaries({}, optional=values).map(lambda chosen: GetMessageClass(descriptor)(**chosen))


def test_the_contract_s_requests_are_all_here() -> None:
    kinds = "Embed EmbedSparse EmbedAll Predict PredictPair Rerank RerankStream Encode Decode".split()
    assert {f"{kind}Request" for kind in kinds} <= set(REQUESTS)


@LAW
@given(st.data(), st.sampled_from(REQUESTS), TARGETS)
def test_the_inner_bytes_are_the_inner_request(data: st.DataObject, name: str, target: dict[str, Any]) -> None:
    descriptor = mux.DESCRIPTOR.message_types_by_name[name]
    kind = descriptor.fields_by_name["request"].message_type
    assert kind is not None
    inner = data.draw(messages(kind))
    raw = GetMessageClass(descriptor)(target=mux.Target(**target), request=inner).SerializeToString()
    assert envelope.unwrap(raw) == (Target(**target), inner.SerializeToString())


@LAW
@given(st.binary(max_size=200), TARGETS, st.booleans())
def test_the_inner_request_is_opaque(inner: bytes, target: dict[str, Any], target_first: bool) -> None:
    """Fields of a newer TEI, or nonsense that TEI shall judge: nothing is read, dropped or reordered."""
    parts = [length_delimited(1, mux.Target(**target).SerializeToString()), length_delimited(2, inner)]
    raw = b"".join(parts if target_first else parts[::-1]) + length_delimited(99, b"future")
    assert envelope.unwrap(raw) == (Target(**target), inner)


def test_what_was_not_sent_is_none() -> None:
    inner = tei.EmbedRequest(inputs="x")
    target = mux.Target(instance_name="a")
    assert envelope.unwrap(b"") == (None, None)
    assert envelope.unwrap(mux.EmbedRequest(request=inner).SerializeToString()) == (None, inner.SerializeToString())
    assert envelope.unwrap(mux.EmbedRequest(target=target).SerializeToString()) == (Target(instance_name="a"), None)
    assert envelope.unwrap(mux.InfoRequest(target=target).SerializeToString()) == (Target(instance_name="a"), None)


def test_an_empty_target_is_no_target_and_an_empty_request_is_a_request() -> None:
    raw = mux.EmbedRequest(target=mux.Target(), request=tei.EmbedRequest()).SerializeToString()
    assert envelope.unwrap(raw) == (None, b"")


def test_a_target_set_to_its_default_value_was_set() -> None:
    for chosen in ({"instance_name": ""}, {"model_id": ""}, {"instance_index": 0}):
        raw = mux.InfoRequest(target=mux.Target(**chosen)).SerializeToString()
        assert envelope.unwrap(raw) == (Target(**chosen), None)


GARBAGE = [b"\xff", b"\x0a\x05ab", b"\x12\x80", b"\x0a\x04\x0a\x02\xff\xfe", b"\x07", b"\x00"]


@pytest.mark.parametrize("raw", GARBAGE, ids=repr)
def test_garbage_is_a_problem(raw: bytes) -> None:
    with pytest.raises(Problem) as caught:
        envelope.unwrap(raw)
    assert caught.value.kind == Kind.INVALID


@LAW
@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_problem(raw: bytes) -> None:
    problem = None
    try:
        target, inner = envelope.unwrap(raw)
    except Problem as caught:
        problem = caught
    if problem:
        assert problem.kind == Kind.INVALID
    else:
        assert target is None or isinstance(target, Target)
        assert inner is None or isinstance(inner, bytes)


def test_the_metadata_of_plain_tei_clients_names_the_target() -> None:
    assert envelope.target_from_metadata({"x-tei-instance": "a"}) == Target(instance_name="a")
    assert envelope.target_from_metadata({"x-tei-model": "org/m"}) == Target(model_id="org/m")
    assert envelope.target_from_metadata({"user-agent": "x"}) is None
