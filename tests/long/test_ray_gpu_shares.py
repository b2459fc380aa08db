"""Ray fills a GPU with the shares of a run's engines before it begins the next, and gives a restarted one its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.environment import variables

PROGRAM = """
import json, logging, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

class Held:
    def gpu(self):
        return ray.get_gpu_ids()

gpus = json.loads(sys.argv[1])
ray.init("local", num_cpus=2, num_gpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
         logging_level=logging.ERROR)
group = placement_group([{"CPU": 0.01, "GPU": num} for num in gpus], strategy="PACK")
ray.get(group.ready())

def start(bundle):
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(Held).options(num_cpus=0.01, num_gpus=gpus[bundle], scheduling_strategy=where).remote()

held = [start(bundle) for bundle in json.loads(sys.argv[2])]
found = ray.get([one.gpu.remote() for one in held])
ray.kill(held[-1])
found.append(ray.get(start(len(gpus) - 1).gpu.remote()))
print(json.dumps(found))
"""


def test_engines_that_share_gpus_fill_one_after_the_other() -> None:
    words = ["experiment=quickstart_gpu", "trainer.num_ranks=2", "rollout.num_workers=6", "rollout.workers_per_gpu=3"]
    config = load_run_config(words)
    gpus = [config.gpus_of_rank] * 2 + [config.gpus_of_worker] * 6
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(gpus), json.dumps([0, 1, 2, 4, 5, 7])],
        env={
            **os.environ,
            **{variable.name: variable.value for variable in variables("cpu")},
            "RAY_AUTH_MODE": "disabled",
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (*ranks, first, third, fourth, sixth, again) = json.loads(done.stdout)
    assert len({first[0], *(rank[0] for rank in ranks), fourth[0]}) == 4, "ranks and engines have GPUs of their own"
    assert first == third != fourth == sixth
    assert again == sixth, "the last engine, started again"
