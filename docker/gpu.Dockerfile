# Slipstream on NVIDIA GPUs (CUDA 13, driver >= 580), RDMA user space included.
#   docker build -f docker/gpu.Dockerfile -t slipstream:gpu .
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 --device=/dev/infiniband slipstream:gpu slipstream doctor
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv libibverbs1 ibverbs-providers libnuma1 libcurl4 gcc g++ make git \
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
RUN SLIPSTREAM_TARGET=gpu requirements/setup.sh

ENV PATH=/opt/slipstream/.venv/bin:$PATH
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 slipstream && mkdir -p /runs && chown slipstream /runs
USER 1000
WORKDIR /runs
CMD ["slipstream", "--help"]
