"""Which module computes which kind of attention."""

from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.conf.architecture.delta_net_spec import DeltaNetSpec
from slipstream.trainer.model.attention.delta_net import GatedDeltaNet
from slipstream.trainer.model.attention.grouped_queries import GroupedQueryAttention
from slipstream.trainer.model.attention.latent import LatentAttention
from slipstream.trainer.model.attention.part import Attention
from slipstream.trainer.model.build import Build


def make_attention(build: Build, layer: int) -> Attention:
    """The attention that the spec asks for in this layer."""
    own = build.spec.attentions[layer]
    match own:
        case DeltaNetSpec():
            return GatedDeltaNet(own, build)
        case MlaSpec():
            return LatentAttention(own, build)
        case GqaSpec():
            return GroupedQueryAttention(own, build)
        case _:
            raise AssertionError(f"no module computes {type(own).__name__}")
