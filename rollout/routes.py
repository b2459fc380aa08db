"""What vLLM returns about the experts of a request's tokens -> the routes that its rollout carries.

Owns alignment, and which routes may be believed. Does not own recording (vLLM's, see engine_options.py) nor replay
(trainer/moe/replay.py). Pure numpy.

    positions     0 .. P-1 prompt, P .. P+R-1 response
    routes        0 .. P+R-2: the last sampled token was never fed to the model
    the route at position t-1 decided the logits from which token t was sampled

Invariant: a route that is not what the engine used at that position is marked as missing. Where it comes from (vLLM
0.25.1, v1/core/sched/scheduler.py, and 0.32, distributed/aux_output_connector/): the positions of the prompt are
returned when its last chunk has run, those of a prefix-cache hit as they were when the blocks were filled; every later
position is returned once, with the token that it led to. A request that is preempted, or whose blocks are dropped by a
publish, is prefilled again, and keeps the routes that it had returned: they are those of the sampled tokens.
"""

import itertools

import numpy as np

from slipstream.rollout.errors import EngineError
from slipstream.rollout.types import Rollout, Routes, RoutingShape

_NOTHING = (
    "vLLM returned a response without the experts that its tokens were routed to: the kernels of this engine do not "
    "record them; set parity.replay_routing=false"
)


def read_routes(
    returned: np.ndarray | None, shape: RoutingShape, num_tokens: int, *, was_aborted: bool = False
) -> Routes:
    """The routes of one request: of num_tokens - 1 positions. All of them are missing when vLLM returned another number
    of positions: then nobody knows which is which. One position is missing when a layer names an expert twice, or one
    that does not exist: a kernel that records nothing leaves zeros.

    Args:
        returned: [positions, decoder layers, K] of integers, as vLLM returned it; None: nothing.
        num_tokens: Of prompt and response.
        was_aborted: Whether the request ended before its time, perhaps before vLLM had any route.

    Raises:
        EngineError: These are not this model's layers or experts per token, or a request that ended by itself has none.
    """
    layers = np.asarray(shape.layers)
    num_positions = max(num_tokens - 1, 0)
    missing = Routes(
        np.zeros((num_positions, len(layers), shape.top_k), shape.dtype), np.zeros(num_positions, dtype=bool)
    )
    if returned is None:
        if not was_aborted:
            raise EngineError(_NOTHING)
        return missing
    if len(returned) != num_positions:
        return missing
    if returned.ndim != 3 or returned.shape[1] <= layers[-1] or returned.shape[2] != shape.top_k:
        raise EngineError(
            f"vLLM returned routes of shape {list(returned.shape)} for a model of at least {layers[-1] + 1} layers and "
            f"{shape.top_k} experts per token"
        )
    chosen = returned[:, layers]
    columns = np.ascontiguousarray(chosen.reshape(-1, shape.top_k).T)  # [K, positions * layers]: quick to compare
    is_good = np.asarray(((columns >= 0) & (columns < shape.num_experts)).all(axis=0))
    for one, other in itertools.combinations(columns, 2):
        is_good &= one != other
    if num_positions and not is_good.any():
        raise EngineError(_NOTHING)
    return Routes(chosen.astype(shape.dtype), np.all(is_good.reshape(num_positions, len(layers)), axis=1))


def continued(so_far: Rollout, part: Rollout) -> Routes | None:
    """Routes of a response whose rest was sampled by another request, with all tokens so far as its prompt. That
    request computed the first positions again, with other weights; the tokens so far were sampled from what the first
    one computed there."""
    if so_far.routes is None or part.routes is None:
        return None
    if not so_far.token_ids:
        return part.routes
    return so_far.routes.then(part.routes.at(slice(len(so_far.routes.is_recorded), None)))
