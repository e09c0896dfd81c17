from appliance.wire.tei.v1 import tei_pb2 as _tei_pb2
from appliance.wire.tei_appliance.v1 import images_pb2 as _images_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EmbedHybridRequest(_message.Message):
    __slots__ = ("inputs", "truncate", "truncation_direction", "prompt_name", "dense", "sparse", "tokens", "normalize", "dimensions")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    inputs: str
    truncate: bool
    truncation_direction: _tei_pb2.TruncationDirection
    prompt_name: str
    dense: bool
    sparse: bool
    tokens: bool
    normalize: bool
    dimensions: int
    def __init__(self, inputs: _Optional[str] = ..., truncate: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., prompt_name: _Optional[str] = ..., dense: _Optional[bool] = ..., sparse: _Optional[bool] = ..., tokens: _Optional[bool] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ...) -> None: ...

class EmbedHybridResponse(_message.Message):
    __slots__ = ("embeddings", "sparse_embeddings", "token_embeddings", "metadata")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedScalarFieldContainer[float]
    sparse_embeddings: _containers.RepeatedCompositeFieldContainer[_tei_pb2.SparseValue]
    token_embeddings: _containers.RepeatedCompositeFieldContainer[_tei_pb2.TokenEmbedding]
    metadata: _tei_pb2.Metadata
    def __init__(self, embeddings: _Optional[_Iterable[float]] = ..., sparse_embeddings: _Optional[_Iterable[_Union[_tei_pb2.SparseValue, _Mapping]]] = ..., token_embeddings: _Optional[_Iterable[_Union[_tei_pb2.TokenEmbedding, _Mapping]]] = ..., metadata: _Optional[_Union[_tei_pb2.Metadata, _Mapping]] = ...) -> None: ...
