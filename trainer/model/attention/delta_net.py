"""Gated DeltaNet as a layer's attention: projections, short convolution, the delta rule, a gated norm.

    x -> in_proj_* -> q, k, v -> convolution, silu -> delta rule -> norm -> * silu(z) -> out_proj (the layer's)
                   -> b, a    -> beta = sigmoid(b), decay = -exp(A_log) softplus(a + dt_bias)

Owns parameter names, which are the checkpoint's. Packed sequences see nothing of each other: the convolution counts
positions, and the recurrence runs over a padded batch with one sequence a row.

Shapes: T packed tokens, H hidden, G key heads, N value heads (M of each key head), K key width, V value width.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.conf.architecture.attention_spec import DeltaNetSpec
from slipstream.conf.schema import Rounding
from slipstream.trainer.kernels import delta_rule
from slipstream.trainer.model.attention.part import Attention
from slipstream.trainer.model.build import Build
from slipstream.trainer.model.operations import Operation
from slipstream.trainer.model.packed_sequences import PackedSequences


class Vector(nn.Module):
    """A parameter under a module's name."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))


class GatedDeltaNet(Attention):
    output_name = "out_proj"

    def __init__(self, own: DeltaNetSpec, build: Build) -> None:
        super().__init__(own, build)
        self.spec, self.eps, self.once = own, build.spec.rms_norm_eps, build.numerics.norm is Rounding.once
        self.inputs = [name for name in self._modules if name.startswith("in_proj_")]
        others, dtype = own.others(build.spec.hidden_size), build.weight_dtype
        self.conv1d = Vector(others["conv1d.weight"].shape, dtype)
        self.dt_bias = nn.Parameter(torch.empty(others["dt_bias"].shape, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(others["A_log"].shape, dtype=torch.float32))  # as engines have it
        self.norm = Vector(others["norm.weight"].shape, dtype)

    def operations(self, x: str, prefix: str) -> Iterator[Operation]:
        names = tuple(f"{prefix}{name}" for name in self.inputs)
        inputs = [self.linear(name) for name in self.inputs]
        yield Operation(f"{prefix}in_proj", (x,), names, lambda at, x: at.by.linears(inputs, x))
        out = f"{prefix}attn"
        yield Operation(out, names, (out,), lambda at, *given: (self.heads(given, at.sequences),))

    def heads(self, projected: Sequence[Tensor], sequences: PackedSequences) -> Tensor:
        """[T, N * V], what out_proj takes, of what the projections of the input give."""
        spec, num_tokens, dtype = self.spec, projected[0].shape[0], projected[0].dtype
        if num_tokens == 0:  # every parameter stays in the graph
            others = [*projected, self.conv1d.weight, self.dt_bias, self.A_log, self.norm.weight]
            unused = torch.stack([one.float().sum() for one in others]).sum()
            return projected[0].new_zeros(0, spec.value_size) + (0.0 * unused).to(dtype)
        mixed_TC, z, b, a = self._split(*projected) if spec.has_fused_inputs else projected
        weight_CK = self.conv1d.weight.to(dtype)[:, 0]
        convolved_TC = delta_rule.short_convolution(mixed_TC, weight_CK, sequences.positions_T)
        convolved_TC = convolved_TC if self.once else convolved_TC.to(dtype)
        mixed_TC = F.silu(convolved_TC).to(dtype)
        q, k, v = mixed_TC.split((spec.key_size, spec.key_size, spec.value_size), dim=-1)
        q_TGK, k_TGK = (part.unflatten(1, (spec.num_key_heads, -1)) for part in (q, k))
        v_TNV, z_TNV = v.unflatten(1, (spec.num_value_heads, -1)), z.reshape(num_tokens, spec.num_value_heads, -1)
        a_TN, b_TN = (part.reshape(num_tokens, -1) for part in (a, b))
        decay_TN = -self.A_log.float().exp() * F.softplus(a_TN.float() + self.dt_bias.to(dtype).float())
        read_TNV = recurrence(q_TGK, k_TGK, v_TNV, decay_TN, b_TN.sigmoid(), sequences)
        return self._gated_norm(read_TNV.to(dtype), z_TNV).flatten(1)

    def _split(self, qkvz_TO: Tensor, ba_TO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, z, b and a: each key head's lie beside each other."""
        spec, values = self.spec, self.spec.group * self.spec.value_head_dim
        qkvz_TGO = qkvz_TO.unflatten(1, (spec.num_key_heads, -1))
        *qkv, z = qkvz_TGO.split((spec.key_head_dim, spec.key_head_dim, values, values), dim=-1)
        b_TGM, a_TGM = ba_TO.unflatten(1, (spec.num_key_heads, -1)).split(spec.group, dim=-1)
        return torch.cat([part.flatten(1) for part in qkv], dim=-1), z, b_TGM, a_TGM

    def _gated_norm(self, x_TNV: Tensor, z_TNV: Tensor) -> Tensor:
        wide, weight = x_TNV.float(), self.norm.weight.to(x_TNV.dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        wide = weight.float() * wide if self.once else (weight * wide.to(x_TNV.dtype)).float()
        return (wide * F.silu(z_TNV.float())).to(x_TNV.dtype)


def recurrence(
    q_TGK: Tensor, k_TGK: Tensor, v_TNV: Tensor, decay_TN: Tensor, beta_TN: Tensor, sequences: PackedSequences
) -> Tensor:
    """The delta rule over each sequence alone. Returns [T, N, V], float32."""
    group = v_TNV.shape[1] // q_TGK.shape[1]
    q, k = (sequences.pad(x).repeat_interleave(group, dim=1) for x in (q_TGK, k_TGK))
    decay, beta = (sequences.pad(x[..., None])[..., 0] for x in (decay_TN, beta_TN))
    return sequences.unpad(delta_rule.gated_delta_rule(q, k, sequences.pad(v_TNV), decay, beta))
