"""Methods of a protocol as typed messages: a verb's annotations say how its arguments and its result are read.

Does not own: sockets (server.py, connection.py), or how plain values and arrays are written
(weight_sync/typed_msgpack.py). A parameter that travels as something else than it is names that:
Annotated[Prompt, SentPrompt], where SentPrompt has of(prompt) and value().
Invariant: what does not fit the annotations is an error of that call, never a value.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from slipstream.conf.errors import SlipstreamError
from slipstream.weight_sync.typed_msgpack import decoder_of, pack

NOT_OURS = "Exception"
"""Named in the place of the class of an error that is none of Slipstream's."""


class Request(msgspec.Struct, array_like=True):
    number: int
    verb: str
    arguments: msgspec.Raw


class Answer(msgspec.Struct, array_like=True):
    """What a call is answered with: the verb's result, or its error."""

    number: int
    error: str
    """Name of the error's class; empty: none was raised."""
    text: str
    """The error's, or what failed in another way than by an error of ours."""
    result: msgspec.Raw


class Verb:
    """One method of a protocol, as messages."""

    def __init__(self, method: Callable[..., object]) -> None:
        hints = typing.get_type_hints(method, include_extras=True)
        self.name = method.__name__
        self.signature = inspect.signature(method)
        declared = [hints[name] for name in list(self.signature.parameters)[1:]]
        self._forms = [getattr(kind, "__metadata__", (None,))[0] for kind in declared]
        parameters = tuple(form or kind for form, kind in zip(self._forms, declared, strict=True))
        self.arguments = decoder_of(tuple[parameters] if parameters else tuple[()])
        self.result = decoder_of(hints["return"])

    def given(self, *args: object, **kwargs: object) -> bytes:
        """The arguments as they travel, with defaults for those left out."""
        bound = self.signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        given = zip(self._forms, bound.args[1:], strict=True)
        return pack([value if form is None else form.of(value) for form, value in given])

    def asked(self, target: object, arguments: bytes | msgspec.Raw) -> Any:
        """What the target's method of this name returns; of an async method, what is to be awaited."""
        sent = zip(self._forms, self.arguments.decode(arguments), strict=True)
        return getattr(target, self.name)(*(value if form is None else value.value() for form, value in sent))


verb_of = functools.cache(Verb)
"""A protocol's method as a verb."""


@functools.cache
def verbs_of(protocol: type) -> dict[str, Verb]:
    """A protocol's methods, by name."""
    return {
        name: verb_of(method)
        for base in protocol.__mro__
        for name, method in vars(base).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def failure_of(request: Request, raised: BaseException) -> Answer:
    """The answer that has the caller raise this error; of one that is none of ours, the text."""
    if isinstance(raised, SlipstreamError):
        error, text = type(raised).__name__, str(raised)
    else:
        error, text = NOT_OURS, f"{request.verb} failed with {type(raised).__name__}: {raised}"
    text = text.encode(errors="replace").decode()  # a file's name may be no text
    return Answer(request.number, error, text, msgspec.Raw(pack(None)))
