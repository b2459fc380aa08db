"""Gives Hydra the schema of conf/schema/, so that YAML and the command line are checked against it while they are
composed.

Owns one name in Hydra's ConfigStore, `schema`, which conf/config.yaml starts from. Importing this module has no effect;
`conf.load` calls `register_schema` before it composes.
"""

import functools

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from slipstream.conf.schema import ModelConfig, RunConfig

SCHEMA_NAME = "schema"


def open_for_overrides(node: DictConfig) -> DictConfig:
    """Clear the read-only mark, which OmegaConf puts on every frozen dataclass, so that YAML and overrides set values.
    The objects that are built from the node are frozen nevertheless."""
    OmegaConf.set_readonly(node, None)
    for key in node:
        if not OmegaConf.is_missing(node, key) and isinstance(child := node[key], DictConfig):
            open_for_overrides(child)
    return node


def schema_node() -> DictConfig:
    """RunConfig as an editable tree of defaults that refuses unknown options and wrong types."""
    tree = open_for_overrides(OmegaConf.structured(RunConfig))
    # RunConfig's default names an architecture, so that RunConfig() is complete. In a composed run the user chooses the
    # model, so start from an empty section, without that default's hf_config.
    tree.model = open_for_overrides(OmegaConf.structured(ModelConfig))
    return tree


@functools.cache
def register_schema() -> None:
    ConfigStore.instance().store(name=SCHEMA_NAME, node=schema_node(), provider="slipstream")
