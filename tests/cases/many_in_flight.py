"""A process with many collectives of the product in flight at once: python many_in_flight.py HOW_MANY

The product waits for each before it makes the next; here nobody waits until there are 64, so that gloo's two workers
end some at the same time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from slipstream.trainer.parallel import gather_wholes, whole


def main(how_many: int) -> None:
    """Ends by a signal where two workers free the same name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    factor = DTensor.from_local(torch.ones(8), init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)
    out = torch.empty(8)
    wait, in_flight = dist.Work.wait, []

    def later(work: dist.Work, *_: Any) -> bool:
        in_flight.append(work)
        return True

    work: Any = dist.Work
    work.wait = later
    while how_many > 0:
        while len(in_flight) < 64:
            gather_wholes([factor], [out])
            whole(factor)
        for work in in_flight:
            wait(work)
        how_many -= len(in_flight)
        in_flight.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]))
