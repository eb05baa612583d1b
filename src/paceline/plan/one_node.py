"""Spreading a job over the devices of one node."""

from __future__ import annotations

from paceline.errors import JobError
from paceline.spec import AlgorithmName, Cluster, Job, Plan


def place(
    job: Job,
    cluster: Cluster,
    num_workers: int,
    *,
    threads_per_worker: int | None = None,
    micro_batch_size: int | None = None,
    algorithm: AlgorithmName = "auto",
    num_servers: int = 1,
) -> Plan:
    """A plan for `num_workers` workers, one a device.

    Args:
        threads_per_worker: None: an even part of the node's cores; always 1 with `parity = "bitwise"`, because how a
            kernel splits its sums among threads may change their last bits.

    Raises:
        JobError: no worker, more workers than GPUs or than virtual shards, more servers than workers, micro-batches
            smaller than a shard, or an algorithm that bitwise parity cannot use.
    """
    if num_workers < 1:
        raise JobError(f"{num_workers} workers cannot train; use at least 1.")
    if cluster.device_kind == "cuda" and num_workers > len(cluster.devices):
        raise JobError(f"{num_workers} workers need as many GPUs, but this machine has {len(cluster.devices)}.")
    if num_workers > job.virtual_shards:
        raise JobError(
            f"{num_workers} workers cannot share virtual_shards = {job.virtual_shards}; use at most "
            f"{job.virtual_shards} workers, or --set virtual_shards={num_workers} (it is part of the job: the same for "
            "every worker count)."
        )
    shard_size = -(-job.global_batch_size // job.virtual_shards)
    if micro_batch_size is not None and micro_batch_size < shard_size:
        raise JobError(
            f"A micro-batch of {micro_batch_size} is smaller than a virtual shard of {shard_size} samples; use "
            f"--set virtual_shards={-(-job.global_batch_size // micro_batch_size)} or a micro-batch of {shard_size}."
        )
    if num_servers > num_workers:
        raise JobError(f"{num_servers} servers are more than {num_workers} workers; servers are some of the workers.")
    if job.parity == "bitwise" and algorithm not in ("auto", "tree_exact"):
        raise JobError(
            f"parity = 'bitwise' sums gradients by tree_exact, not by {algorithm}; leave --algorithm out or train with "
            "parity = 'numeric'."
        )
    even = max(1, cluster.num_cores // num_workers)
    return Plan(
        world_size=num_workers,
        device_kind=cluster.device_kind,
        threads_per_worker=1 if job.parity == "bitwise" else threads_per_worker or even,
        micro_batch_size=micro_batch_size,
        algorithm="tree_exact" if job.parity == "bitwise" else algorithm,
        num_servers=num_servers,
    )
