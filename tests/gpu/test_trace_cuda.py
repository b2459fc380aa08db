"""On a GPU: stages of the device are placed on the host's clock."""

import time

import pytest
import torch

from slipstream.weight_sync.pipeline.trace import Tracer

pytestmark = pytest.mark.gpu


def test_device_stages_lie_where_the_device_was_at_work() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    before = time.time()
    tracer = Tracer(device, is_on=True)
    marks = [tracer.mark()]
    for _ in range(2):
        matrix = matrix @ matrix
        marks.append(tracer.mark())
    tracer.device("pack slot 0", "load 0", marks[0], marks[1])
    tracer.device("hash slot 0", "load 0", marks[1], marks[2])
    torch.cuda.synchronize()
    after = time.time()
    spans = {span.track: span for span in tracer.finish() if span.track != "gc"}
    pack, hashing = spans["pack slot 0"], spans["hash slot 0"]
    assert before - 0.005 <= pack.start_s < pack.stop_s <= hashing.start_s + 1e-6
    assert hashing.start_s < hashing.stop_s <= after + 0.005
