from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EmbedImageRequest(_message.Message):
    __slots__ = ("image", "normalize", "dimensions")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    image: bytes
    normalize: bool
    dimensions: int
    def __init__(self, image: _Optional[bytes] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ...) -> None: ...
