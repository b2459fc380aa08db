"""The AdamW update of local tensors, with moments in the format and place that trainer.optim.state asks for.

    float32    torch.optim's AdamW, fused                  16 bytes per float32 parameter with its gradient
    bfloat16   torchao's update, moments in bfloat16       12
    int8       torchao's formats, 256 values per scale      10    (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861)
    host       float32 moments in (pinned) host memory      8 on the device; each moment crosses the bus twice a step

Parameters in bfloat16 (trainer.lora.dtype) save 4 bytes more. Their updates are rounded stochastically, because most
updates are smaller than half a unit in the last place of a bfloat16. So are squares in bfloat16: a step changes one by
a thousandth of the difference (betas[1]=0.999), and rounded to nearest it would never fall after gradients did. A
square in 8 bits is never 0: one below the map's smallest value would be forgotten at every step, and the next one
divided by a single gradient, or by eps.

Owns the moments. Does not own the schedule, clipping, or the decision whether a step happens (learner.py).
Invariant: training continues bitwise from state that was read and set by `tensors`.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from slipstream.conf.schema import OptimConfig, OptimState
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.kernels.adamw_update import Codes, adamw_triton
from slipstream.weight_sync.merging.rounding import dithered

MOMENTS = ("exp_avg", "exp_avg_sq")


class ReducedMoments:
    """torchao's update: float32 arithmetic, moments stored in fewer bits. On CUDA one kernel does the arithmetic
    (trainer.kernels.adamw_update), launched once for all parameters of a size. torchao's own, compiled, takes the host
    0.3 ms per parameter: half of a short step when experts have adapters."""

    def __init__(self, parameters: Sequence[Tensor], config: OptimConfig) -> None:
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise TrainerError(
                f"trainer.optim.state={config.state} (and bfloat16 adapters) need the package torchao: {error}"
            ) from error
        self._parameters = list(parameters)
        self._config = config
        self._num_updates = 0
        self._adamw: Any = AdamW8bit(
            self._parameters,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            bf16_stochastic_round=True,
        )
        for parameter in self._parameters:  # takes the memory before the first step
            self._adamw.state[parameter] = {"step": torch.tensor(0.0)} | {
                key: self._new_moment(parameter, config.state, is_signed=key == "exp_avg") for key in MOMENTS
            }

    def _new_moment(self, parameter: Tensor, state: OptimState, *, is_signed: bool) -> Tensor:
        if state is OptimState.int8:  # torchao does not quantize tensors that are small or not a multiple of the block
            return self._adamw._new_buffer(parameter, is_signed)
        return torch.zeros_like(parameter, dtype=getattr(torch, state.value))

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        self._num_updates += 1
        if self._parameters[0].is_cuda:
            self._step_on_cuda(gradients, lr)
            return
        for group in self._adamw.param_groups:
            group["lr"].fill_(lr)
        squares = [self._adamw.state[parameter]["exp_avg_sq"] for parameter in self._parameters]
        is_bfloat16 = self._config.state is OptimState.bfloat16
        before = [square.float() for square in squares] if is_bfloat16 else []
        # For a CPU, compiling takes many seconds and gains nothing at the sizes that run there.
        with torch.compiler.set_stance("force_eager"):
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._adamw.step()
            self._adamw.zero_grad(set_to_none=True)
        for square, old, gradient in zip(squares, before, gradients, strict=is_bfloat16):
            wide = old.lerp_(gradient.float().square(), 1 - self._config.betas[1])
            bits = torch.randint(-(1 << 31), (1 << 31) - 1, wide.shape, dtype=torch.int32)
            square.copy_(dithered(wide, bits, torch.bfloat16))
        for square in squares:
            if (codes := _parts(square).get("codes")) is not None:
                codes.clamp_(min=1)

    def _step_on_cuda(self, gradients: Sequence[Tensor], lr: float) -> None:
        states = [self._adamw.state[parameter] for parameter in self._parameters]
        moments, squares = ([_coded(state[key]) for state in states] for key in MOMENTS)
        adamw_triton(
            self._parameters,
            gradients,
            moments,
            squares,
            lr=lr,
            betas=(self._config.betas[0], self._config.betas[1]),
            eps=self._config.eps,
            weight_decay=self._config.weight_decay,
            num_updates=self._num_updates,
            seed=int(torch.randint(2**31 - len(gradients), ())),
        )

    def tensors(self) -> list[dict[str, Tensor]]:
        """An 8-bit moment is two tensors, its codes and its scales."""
        found: list[dict[str, Tensor]] = []
        for parameter in self._parameters:
            parts: dict[str, Tensor] = {}
            for key in MOMENTS:
                moment = self._adamw.state[parameter][key]
                parts |= {f"{key}.{p}" if p else key: tensor for p, tensor in _parts(moment).items()}
            found.append(parts)
        return found

    def restarts_at(self, num_updates: int) -> None:
        self._num_updates = num_updates
        for parameter in self._parameters:
            self._adamw.state[parameter]["step"].fill_(num_updates)


class FullMoments:
    """Float32 moments, updated by torch's fused AdamW.

    Those in host memory, pinned for a GPU, go to the device and back at every update. Two streams alternate: while one
    updates a parameter, the other copies the next one's moments. Work on one stream runs in order, so its memory can be
    reused at once, and the device holds two parameters' moments at most.
    """

    def __init__(self, parameters: Sequence[Tensor], config: OptimConfig, *, on_host: bool) -> None:
        self._parameters, self._config = list(parameters), config
        device = self._parameters[0].device
        self._on_host = on_host
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_host and device.type == "cuda" else []
        where: dict[str, Any] = {"device": "cpu", "pin_memory": bool(self._streams)} if on_host else {"device": device}
        self._moments = [
            {key: torch.zeros(p.shape, dtype=torch.float32, **where) for key in MOMENTS} for p in self._parameters
        ]
        self._steps = [torch.zeros((), dtype=torch.float32, device=device) for _ in self._parameters]

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        if not self._on_host:
            self._update(self._parameters, gradients, self._moments, self._steps, lr)
            return
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        each = zip(self._parameters, gradients, self._moments, self._steps, strict=True)
        for index, (parameter, gradient, held, step) in enumerate(each):
            turn = self._streams[index % 2] if self._streams else None
            with torch.cuda.stream(turn) if turn is not None else contextlib.nullcontext():
                moments = {key: held[key].to(parameter.device, non_blocking=True) for key in MOMENTS}
                self._update([parameter], [gradient], [moments], [step], lr)
                for key in MOMENTS:
                    if held[key] is not moments[key]:
                        held[key].copy_(moments[key], non_blocking=True)
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
            stream.synchronize()  # the host may read the moments next

    def _update(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], moments: Sequence[Mapping[str, Tensor]],
        steps: Sequence[Tensor], lr: float,
    ) -> None:  # fmt: skip
        config, (averages, squares) = self._config, ([one[key] for one in moments] for key in MOMENTS)
        adamw(
            list(parameters), list(gradients), averages, squares, [], list(steps), fused=True, amsgrad=False,
            beta1=config.betas[0], beta2=config.betas[1], lr=lr, weight_decay=config.weight_decay, eps=config.eps,
            maximize=False,
        )  # fmt: skip

    def tensors(self) -> list[dict[str, Tensor]]:
        return [dict(moments) for moments in self._moments]

    def restarts_at(self, num_updates: int) -> None:
        for step in self._steps:
            step.fill_(num_updates)


UpdateRule = FullMoments | ReducedMoments
"""AdamW over a fixed list of tensors, none of them empty. `step` is one update in place, by gradients of their shapes
and dtypes; `tensors` gives each one's moments as plain tensors by name, which may be written, and `restarts_at` tells
how many updates they are of."""


def make_update_rule(parameters: Sequence[Tensor], config: OptimConfig) -> UpdateRule:
    """The rule that config.state asks for.

    Raises:
        TrainerError: torchao is missing.
    """
    if config.state is OptimState.host:
        return FullMoments(parameters, config, on_host=True)
    if config.state is OptimState.float32 and all(parameter.dtype is torch.float32 for parameter in parameters):
        return FullMoments(parameters, config, on_host=False)
    return ReducedMoments(parameters, config)


def _coded(moment: Any) -> Tensor | Codes:
    codes: Tensor | None = getattr(moment, "codes", None)
    return moment if codes is None else Codes(codes, moment.scale, moment.qmap)


def _parts(moment: Tensor) -> dict[str, Tensor]:
    """A plain tensor as {"": tensor}; torchao's 8-bit tensor as its codes and scales."""
    codes: Tensor | None = getattr(moment, "codes", None)
    scale: Tensor | None = getattr(moment, "scale", None)
    return {"": moment} if codes is None or scale is None else {"codes": codes, "scale": scale}
