"""The two functions of msgpack that are used here; the package comes without types."""

from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

def packb(o: object, *, default: Callable[[Any], object] | None = None) -> bytes: ...
def unpackb(packed: Buffer, *, use_list: bool = True, strict_map_key: bool = True) -> Any: ...
