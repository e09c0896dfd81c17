from appliance.wire.tei.v1 import tei_pb2 as _tei_pb2
from appliance.wire.tei_appliance.v1 import images_pb2 as _images_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutputDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_DTYPE_FLOAT32: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_FLOAT16: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_INT8: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_UINT8: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_BINARY: _ClassVar[OutputDtype]
    OUTPUT_DTYPE_UBINARY: _ClassVar[OutputDtype]

class HybridOutput(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HYBRID_OUTPUT_DENSE: _ClassVar[HybridOutput]
    HYBRID_OUTPUT_SPARSE: _ClassVar[HybridOutput]
    HYBRID_OUTPUT_TOKENS: _ClassVar[HybridOutput]
OUTPUT_DTYPE_FLOAT32: OutputDtype
OUTPUT_DTYPE_FLOAT16: OutputDtype
OUTPUT_DTYPE_INT8: OutputDtype
OUTPUT_DTYPE_UINT8: OutputDtype
OUTPUT_DTYPE_BINARY: OutputDtype
OUTPUT_DTYPE_UBINARY: OutputDtype
HYBRID_OUTPUT_DENSE: HybridOutput
HYBRID_OUTPUT_SPARSE: HybridOutput
HYBRID_OUTPUT_TOKENS: HybridOutput

class Target(_message.Message):
    __slots__ = ("instance_name", "model_id", "instance_index")
    INSTANCE_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    instance_name: str
    model_id: str
    instance_index: int
    def __init__(self, instance_name: _Optional[str] = ..., model_id: _Optional[str] = ..., instance_index: _Optional[int] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: bytes
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[bytes] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: Target
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedRequest, _Mapping]] = ...) -> None: ...

class EmbedSparseRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedSparseRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedSparseRequest, _Mapping]] = ...) -> None: ...

class EmbedAllRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedAllRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedAllRequest, _Mapping]] = ...) -> None: ...

class EmbedImageRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _images_pb2.EmbedImageRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_images_pb2.EmbedImageRequest, _Mapping]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.PredictRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.PredictRequest, _Mapping]] = ...) -> None: ...

class PredictPairRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.PredictPairRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.PredictPairRequest, _Mapping]] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.RerankRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.RerankRequest, _Mapping]] = ...) -> None: ...

class RerankStreamRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.RerankStreamRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.RerankStreamRequest, _Mapping]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EncodeRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EncodeRequest, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.DecodeRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.DecodeRequest, _Mapping]] = ...) -> None: ...

class EmbedArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "truncate", "normalize", "noop", "truncation_direction", "prompt_name", "dimensions", "output_dtype")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    target: Target
    arrow_ipc: bytes
    truncate: bool
    normalize: bool
    noop: bool
    truncation_direction: _tei_pb2.TruncationDirection
    prompt_name: str
    dimensions: int
    output_dtype: OutputDtype
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., truncate: _Optional[bool] = ..., normalize: _Optional[bool] = ..., noop: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., prompt_name: _Optional[str] = ..., dimensions: _Optional[int] = ..., output_dtype: _Optional[_Union[OutputDtype, str]] = ...) -> None: ...

class EmbedArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc", "metadata")
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    metadata: _tei_pb2.Metadata
    def __init__(self, arrow_ipc: _Optional[bytes] = ..., metadata: _Optional[_Union[_tei_pb2.Metadata, _Mapping]] = ...) -> None: ...

class EmbedSparseArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "truncate", "noop", "truncation_direction", "prompt_name")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    target: Target
    arrow_ipc: bytes
    truncate: bool
    noop: bool
    truncation_direction: _tei_pb2.TruncationDirection
    prompt_name: str
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., truncate: _Optional[bool] = ..., noop: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., prompt_name: _Optional[str] = ...) -> None: ...

class EmbedSparseArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc", "metadata")
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    metadata: _tei_pb2.Metadata
    def __init__(self, arrow_ipc: _Optional[bytes] = ..., metadata: _Optional[_Union[_tei_pb2.Metadata, _Mapping]] = ...) -> None: ...

class EmbedAllArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "truncate", "noop", "truncation_direction", "prompt_name", "output_dtype")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    target: Target
    arrow_ipc: bytes
    truncate: bool
    noop: bool
    truncation_direction: _tei_pb2.TruncationDirection
    prompt_name: str
    output_dtype: OutputDtype
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., truncate: _Optional[bool] = ..., noop: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., prompt_name: _Optional[str] = ..., output_dtype: _Optional[_Union[OutputDtype, str]] = ...) -> None: ...

class EmbedAllArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc", "metadata")
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    metadata: _tei_pb2.Metadata
    def __init__(self, arrow_ipc: _Optional[bytes] = ..., metadata: _Optional[_Union[_tei_pb2.Metadata, _Mapping]] = ...) -> None: ...

class HybridRequest(_message.Message):
    __slots__ = ("inputs", "legs", "truncate", "truncation_direction", "partial")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    inputs: str
    legs: _containers.RepeatedCompositeFieldContainer[HybridLeg]
    truncate: bool
    truncation_direction: _tei_pb2.TruncationDirection
    partial: bool
    def __init__(self, inputs: _Optional[str] = ..., legs: _Optional[_Iterable[_Union[HybridLeg, _Mapping]]] = ..., truncate: _Optional[bool] = ..., truncation_direction: _Optional[_Union[_tei_pb2.TruncationDirection, str]] = ..., partial: _Optional[bool] = ...) -> None: ...

class HybridLeg(_message.Message):
    __slots__ = ("target", "output", "prompt_name", "normalize", "dimensions")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    target: Target
    output: HybridOutput
    prompt_name: str
    normalize: bool
    dimensions: int
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., output: _Optional[_Union[HybridOutput, str]] = ..., prompt_name: _Optional[str] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ...) -> None: ...

class HybridResponse(_message.Message):
    __slots__ = ("results", "passes")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[HybridResult]
    passes: int
    def __init__(self, results: _Optional[_Iterable[_Union[HybridResult, _Mapping]]] = ..., passes: _Optional[int] = ...) -> None: ...

class HybridResult(_message.Message):
    __slots__ = ("instance", "embeddings", "sparse_embeddings", "token_embeddings", "metadata", "error")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    instance: str
    embeddings: _containers.RepeatedScalarFieldContainer[float]
    sparse_embeddings: _containers.RepeatedCompositeFieldContainer[_tei_pb2.SparseValue]
    token_embeddings: _containers.RepeatedCompositeFieldContainer[_tei_pb2.TokenEmbedding]
    metadata: _tei_pb2.Metadata
    error: HybridError
    def __init__(self, instance: _Optional[str] = ..., embeddings: _Optional[_Iterable[float]] = ..., sparse_embeddings: _Optional[_Iterable[_Union[_tei_pb2.SparseValue, _Mapping]]] = ..., token_embeddings: _Optional[_Iterable[_Union[_tei_pb2.TokenEmbedding, _Mapping]]] = ..., metadata: _Optional[_Union[_tei_pb2.Metadata, _Mapping]] = ..., error: _Optional[_Union[HybridError, _Mapping]] = ...) -> None: ...

class HybridError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
