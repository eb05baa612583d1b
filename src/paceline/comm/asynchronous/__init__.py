"""Asynchronous training: workers compute virtual shards, servers update parameters, and the staleness is fixed.

Batch k is divided into virtual shards as everywhere in Paceline, but no worker owns any: an idle worker asks for the
next shard, computes its gradient on the parameters after k - staleness updates, and sends it to the servers. When all
shards of batch k have arrived, each server adds them in the order of `comm.fixed_tree` and makes update k of the
parameters that it holds. So the number and speed of the workers decide who computes a shard; never which shards there
are, how old their parameters are, nor how they are added: the weights are the same, bit for bit, on any number of
workers and servers, and with staleness 0 those of synchronous training. Whenever all workers pause, no gradient is
late; from there staleness grows again.

A worker that is lost costs its shards some time: others compute them. A server that is lost ends the run.

    worker       takes a shard, computes it, delivers its gradient
    ledger       which shard is leased to whom and what has arrived, without clocks, threads or messages
    server       some of the parameters with their optimizer; the first server also gives out the shards
    calls        the messages between them
"""

from __future__ import annotations

from paceline.comm.asynchronous.worker import AsynchronousWorker

__all__ = ["AsynchronousWorker"]
