"""A port for a server that a test starts."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Free, and nobody else's in the block: who asks for any port gets another one, of this run of the tests or of one
    beside it. A server binds it with SO_REUSEADDR, as servers do, because nobody listens here.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
