"""`parameter_server_async`: workers compute shards, servers update parameters, and the staleness is fixed.

Batch k is divided into virtual shards as everywhere in Paceline, but no worker owns any: an idle worker asks for the
next shard, computes its gradient on the parameters after k - staleness updates, and pushes it to the servers. When all
shards of batch k have arrived, each server adds them in the order of `comm.fixed_tree` and makes update k on its slice
of the parameters. So the number and speed of the workers decide who computes a shard; never which shards there are, how
old their parameters are, nor how they are added: the weights are the same, bit for bit, on any number of workers and
servers, and with staleness 0 those of synchronous training. Whenever all workers pause, no gradient is late; from
there staleness grows again.

A node may act as one worker: it takes one shard for each of its workers, adds their gradients inside, in the same
tree, and uploads and downloads once. With a power of two of workers, and batches of a multiple of so many shards, what
crosses its link falls by their number; else a run of shards is sent as the few blocks of the tree it consists of.

A worker that is lost costs its shards some time: others compute them. A server that is lost ends the run.

    worker       what a worker does: take a shard, compute, deliver
    exchange     what it exchanges with the servers meanwhile
    node         the workers of one node that act as one
    coordinator  leases shards to workers, notices which workers are lost
    ledger       which shard is leased to whom and what has arrived, without clocks, threads or messages
    server       a slice of the parameters and its optimizer
    messages     what workers, servers and the coordinator tell each other
    peers        calls between workers
"""

from __future__ import annotations

from paceline.comm.parameter_server_async.worker import ParameterServerAsync, ServerSettings, UpdateSchedule

__all__ = ["ParameterServerAsync", "ServerSettings", "UpdateSchedule"]
