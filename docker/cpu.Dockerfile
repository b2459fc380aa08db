# Slipstream on a machine without GPUs: the quick start and the tests.
#   docker build -f docker/cpu.Dockerfile -t slipstream:cpu .
#   docker run --rm -it --shm-size=2g slipstream:cpu slipstream train experiment=quickstart
FROM python:3.11-slim-bookworm

# The libraries: Mooncake's engine links them even when it only speaks TCP. gcc: Triton and torch build small helpers at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4 gcc g++ make git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream
COPY requirements requirements
COPY pyproject.toml README.md ./
COPY slipstream slipstream
COPY conf conf
COPY weight_sync weight_sync
COPY trainer trainer
COPY rollout rollout
COPY orchestrator orchestrator
COPY fleet fleet
RUN SLIPSTREAM_TARGET=cpu requirements/setup.sh

ENV PATH=/opt/slipstream/.venv/bin:$PATH
RUN useradd --create-home --uid 1000 slipstream && mkdir -p /runs && chown slipstream /runs
USER 1000
WORKDIR /runs
CMD ["slipstream", "--help"]
