"""Methods of a protocol as typed messages: a verb's annotations say how its arguments and its result are read.

Owns: the messages of a call, and what travels in the place of a prompt and of sampling options. Does not own: sockets
(calls.py), or how plain values and arrays are written (weight_sync/typed_msgpack.py).
Invariant: what does not fit the annotations is an error of that call, never a value.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from slipstream.conf.errors import SlipstreamError
from slipstream.conf.schema import EvalSampling, SamplingConfig
from slipstream.rollout.errors import EngineError
from slipstream.rollout.types import Prompt
from slipstream.weight_sync.typed_msgpack import decoder_of, pack


class _PromptForm(msgspec.Struct, array_like=True):
    """What a worker needs of a prompt: a row's other columns may be anything."""

    prompt_id: int
    token_ids: tuple[int, ...]


class _SamplingForm(msgspec.Struct, array_like=True):
    """One of the two."""

    training: SamplingConfig | None
    evaluation: EvalSampling | None


_FORMS: dict[Any, Any] = {Prompt: _PromptForm, SamplingConfig | None: _SamplingForm | None}
"""Type of a parameter -> as what it travels, where not as it is."""


def _form_of(argument: object) -> object:
    match argument:
        case Prompt():
            return _PromptForm(argument.prompt_id, argument.token_ids)
        case EvalSampling():
            return _SamplingForm(None, argument)
        case SamplingConfig():
            return _SamplingForm(argument, None)
        case _:
            return argument


def _argument_of(form: object) -> object:
    match form:
        case _PromptForm():
            return Prompt(form.prompt_id, form.token_ids, "")
        case _SamplingForm():
            return form.evaluation or form.training
        case _:
            return form


class Request(msgspec.Struct, array_like=True):
    """One call."""

    number: int
    verb: str
    arguments: msgspec.Raw


class Answer(msgspec.Struct, array_like=True):
    """Its result, or its error."""

    number: int
    error: str
    """Name of the error's class; empty: none was raised."""
    text: str
    """The error's, or what failed in another way than by an error of ours."""
    result: msgspec.Raw


class Verb:
    """One method of a protocol, as messages."""

    def __init__(self, method: Callable[..., object]) -> None:
        hints = typing.get_type_hints(method)
        self.name = method.__name__
        self.signature = inspect.signature(method)
        declared = [hints[name] for name in list(self.signature.parameters)[1:]]
        parameters = tuple(_FORMS.get(kind, kind) for kind in declared)
        self.arguments = decoder_of(tuple[parameters] if parameters else tuple[()])
        self.result = decoder_of(hints["return"])

    def given(self, *args: object, **kwargs: object) -> bytes:
        """The arguments as they travel, with defaults for those left out."""
        bound = self.signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        return pack([*map(_form_of, bound.args[1:])])

    def asked(self, target: object, arguments: bytes | msgspec.Raw) -> Any:
        """What the target's method of this name returns; of an async method, what is to be awaited."""
        return getattr(target, self.name)(*map(_argument_of, self.arguments.decode(arguments)))


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
    """The answer that has the caller raise this error, or EngineError for what is none of ours."""
    if isinstance(raised, SlipstreamError):
        error, text = type(raised).__name__, str(raised)
    else:
        error, text = EngineError.__name__, f"{request.verb} failed with {type(raised).__name__}: {raised}"
    text = text.encode(errors="replace").decode()  # a file's name may be no text
    return Answer(request.number, error, text, msgspec.Raw(pack(None)))
