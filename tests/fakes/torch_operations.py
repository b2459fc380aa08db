"""vLLM's operations in plain torch, for trainer.engine_ops on a machine without a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchOperations:
    """What trainer.engine_ops.vllm_operations promises, in float32 formulas; `shift` picks other experts on purpose."""

    def __init__(self, theta: float = 10000.0, head_dim: int = 16, shift: int = 0) -> None:
        self.theta, self.head_dim, self.shift = theta, head_dim, shift
        self.chosen: list[Tensor] = []

    @torch.no_grad()
    def norm(self, x, weight, eps):
        return (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)

    def linear(self, x, weight, bias=None):
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    def rotate(self, q, k, sequences):
        frequencies = self.theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = (sequences.positions_T[:, None] * frequencies)[:, None]

        def turned(x):
            first, second = x.chunk(2, -1)
            parts = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
            return torch.cat(parts, -1).to(x.dtype)

        return turned(q), turned(k)

    def attend(self, q, k, v, sequences, scale):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        outs = []
        for start, stop in zip(sequences.starts, sequences.starts[1:], strict=False):
            logits = torch.einsum("qnd,knd->nqk", q[start:stop], k[start:stop]) * scale
            hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
            outs.append(torch.einsum("nqk,knd->qnd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v[start:stop]))
        return torch.cat(outs)

    def silu_and_mul(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def route(self, x, logits, top_k, does_normalize):
        probabilities = logits.softmax(-1)
        experts = (probabilities.topk(top_k).indices + self.shift) % logits.shape[1]
        weights = probabilities.gather(1, experts)
        self.chosen.append(experts)
        return (weights / weights.sum(-1, keepdim=True) if does_normalize else weights), experts.to(torch.int32)

    def experts(self, x, gate_up, down, weights, experts):
        out = torch.zeros_like(x)
        for choice in range(experts.shape[1]):
            h = self.silu_and_mul(torch.einsum("th,tih->ti", x, gate_up[experts[:, choice].long()]))
            out += weights[:, choice, None] * torch.einsum("ti,thi->th", h, down[experts[:, choice].long()])
        return out

    def token_logprobs(self, logits, targets):
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
