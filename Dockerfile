# Paceline in a container for CPUs or, with a CUDA build of torch, for GPUs:
#   docker build -t paceline . && docker run --rm --ipc=host paceline train digits-lenet -n 2
# Workers of a node share memory, so a container needs --ipc=host or --shm-size.
FROM python:3.11-slim

# The index that torch comes from decides for which devices it is built; empty: pip's own.
ARG TORCH_INDEX=""

WORKDIR /opt/paceline
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt .

WORKDIR /workspace
ENTRYPOINT ["paceline"]
