"""vLLM's plugin entry point: makes `--weight-transfer-config '{"backend": "slipstream"}'` known to every vLLM process.

vLLM calls register() in each of its processes, also in those of engines that use another backend, so nothing else is
imported or changed here.
"""

import logging

logger = logging.getLogger(__name__)

BACKEND = "slipstream"


def register() -> None:
    """Register the backend; a second call changes nothing. If vLLM has no weight transfer, this is only logged."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as e:
        from slipstream.rollout.in_vllm.vllm_patches import RELEASES

        logger.warning("the slipstream weight-transfer backend needs vLLM %s: %s", RELEASES, e)
        return
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "slipstream.rollout.served.backend", "SlipstreamTransferEngine"
        )
    except ValueError:
        logger.debug("the backend is registered already")
