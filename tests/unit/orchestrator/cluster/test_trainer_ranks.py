"""What trainer ranks try before a run, so that memory runs out at its start or never."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.cluster.ray_cluster import RayCluster, RunContext
from slipstream.orchestrator.cluster.trainer_ranks import start_trainer_ranks
from slipstream.orchestrator.files.run_folder import RunFolder

FACTS = {
    "pid": 1, "load_parts_s": {}, "backends": {}, "device": "cpu", "num_parameters": 0, "num_trainable_parameters": 0,
    "dense_weights": "", "whole_bytes": 0, "mtp_tensors": [], "unadapted_matrices": 0, "ignored_tensors": [],
}  # fmt: skip


async def test_a_microbatch_is_tried_that_fills_all_ranks_which_share_its_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def result_of(_: RayCluster, answer: object, *__: object) -> object:
        return answer

    actor = Mock()
    actor.load.remote.return_value = FACTS
    actor.call.remote.return_value = {"seconds": 1.0, "peak_device_bytes": 0}
    monkeypatch.setattr(RayCluster, "new_actor", AsyncMock(return_value=actor))
    monkeypatch.setattr(RayCluster, "result_of", result_of)
    config = RunConfig()
    tokens = 2 * config.rollout.max_model_len
    config = replace(config, trainer=replace(config.trainer, max_microbatch_tokens=tokens, num_ranks=2, cp_size=2))
    cluster = RayCluster(config, RunFolder(tmp_path), None, needs_gpus=False, on_lost=list)
    run = RunContext(config, cluster, "cuda", {}, b"", is_one_node=True, startup=Mock())
    await start_trainer_ranks(run, [0, 1])
    what, lengths = actor.call.remote.call_args.args
    assert (what, len(lengths)) == ("warm_up", 4)
