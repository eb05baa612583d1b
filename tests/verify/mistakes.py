"""Mistakes with which N workers learn something else than one, or two equal runs differ; one class for each cause."""

from __future__ import annotations

import copy
import itertools
import os
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import paceline
from tests.verify.scripts import Cause, Net, Read, Script, cases_of, inputs_of, mean_of, square, stack, times

_num_calls = 0


def _clamp(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.clamp_(-0.01, 0.01)


class State(Script):
    cause = Cause.STATE

    def a_memory_bank_in_the_model(self) -> None:
        class Bank(Net):
            bank: deque[Tensor]

            def forward(self, inputs: Tensor) -> Any:
                outputs = super().forward(inputs)
                self.bank.append(outputs.detach())
                return outputs - torch.cat(list(self.bank)).mean(0)

        self._use(Bank())
        self.model.bank = deque(maxlen=3)

    def a_counter_of_calls_in_the_model(self) -> None:
        class Annealed(Net):
            num_calls = 0

            def forward(self, inputs: Tensor) -> Any:
                self.num_calls += 1
                return super().forward(inputs) / self.num_calls

        self._use(Annealed())

    def a_running_mean_of_losses_in_a_closure(self) -> None:
        mean = 1.0

        def loss(model: nn.Module, shard: Any) -> Tensor:
            nonlocal mean
            value = square(model, shard)
            mean = 0.9 * mean + 0.1 * value.item()
            return value / mean

        self.loss = loss

    def a_counter_in_a_dictionary(self) -> None:
        counts = {"calls": 0}

        def loss(model: nn.Module, shard: Any) -> Tensor:
            counts["calls"] += 1
            return square(model, shard) * min(1.0, counts["calls"] / 10)

        self.loss = loss

    def an_array_of_the_last_losses(self) -> None:
        last = np.ones(3)

        def loss(model: nn.Module, shard: Any) -> Tensor:
            value = square(model, shard)
            last[:] = [*last[1:], value.item()]
            return value / float(last.mean())

        self.loss = loss

    def the_first_loss_as_the_unit_of_all(self) -> None:
        first: Tensor | None = None

        def loss(model: nn.Module, shard: Any) -> Tensor:
            nonlocal first
            value = square(model, shard)
            first = value.detach() if first is None else first
            return value / first

        self.loss = loss

    def a_cache_by_the_number_of_samples(self) -> None:
        cache: dict[int, Tensor] = {}
        self.loss = lambda model, shard: square(model, times(shard, cache.setdefault(len(shard[0]), shard[0].mean(0))))

    def a_list_of_the_last_batches(self) -> None:
        past: list[Tensor] = []

        def loss(model: nn.Module, shard: Any) -> Tensor:
            past.append(shard[0].mean(0))
            return square(model, [shard[0] - torch.stack(past).mean(0), shard[1]])

        self.loss = loss

    def an_attribute_of_a_class(self) -> None:
        class Scale:
            value = 1.0

        def loss(model: nn.Module, shard: Any) -> Tensor:
            Scale.value *= 0.9
            return square(model, shard) * Scale.value

        self.loss = loss

    def a_global_variable(self) -> None:
        def loss(model: nn.Module, shard: Any) -> Tensor:
            global _num_calls
            _num_calls += 1
            return square(model, shard) / _num_calls

        self.loss = loss

    def a_default_argument(self) -> None:
        def loss(model: nn.Module, shard: Any, seen: list[float] = []) -> Tensor:  # noqa: B006 - the mistake
            seen.append(shard[0].mean().item())
            return square(model, shard) * (1 + sum(seen))

        self.loss = loss

    def a_number_in_a_file(self) -> None:
        folder = tempfile.TemporaryDirectory()

        def loss(model: nn.Module, shard: Any) -> Tensor:
            with Path(folder.name, "calls").open("a+") as file:
                file.write("x")
                return square(model, shard) / file.tell()

        self.loss = loss

    def weights_from_an_iterator(self) -> None:
        weights = itertools.cycle([1.0, 0.5, 0.25])
        self.loss = lambda model, shard: square(model, shard) * next(weights)


class Own(Script):
    cause = Cause.OWN

    def an_attribute_of_the_model_set_by_the_workers_own_samples(self) -> None:
        self.model.temperature = 1.0
        self.loss = lambda model, shard: square(model, shard) / model.temperature
        self.after_step = lambda batch: setattr(self.model, "temperature", 1 + mean_of(batch))

    def a_variable_set_by_the_workers_own_samples(self) -> None:
        scale = 1.0

        def set_scale(batch: Any) -> None:
            nonlocal scale
            scale = 1 + mean_of(batch)

        self.loss = lambda model, shard: square(model, shard) * scale
        self.after_step = set_scale

    def a_centre_set_by_the_workers_own_samples(self) -> None:
        centre = torch.zeros(4, dtype=torch.float64)
        self.loss = lambda model, shard: square(model, [shard[0] - centre, shard[1]])
        self.after_step = lambda batch: centre.lerp_(inputs_of(batch).mean(0), 0.1)

    def a_rate_of_a_term_that_rank_0_alone_lowers_late(self) -> None:
        rates = {"term": 1.0}
        self.loss = lambda model, shard: square(model, shard) * rates["term"]
        if self.run.rank == 0:
            self.after_step = lambda _: self.run.steps == 4 and rates.update(term=0.5)


class Draws(Script):
    cause = Cause.RANDOM

    def a_generator_of_numpy_in_the_model(self) -> None:
        self.model.own = np.random.default_rng(3)
        self.loss = lambda model, shard: square(model, times(shard, model.own.random()))

    def a_draw_on_rank_0_alone(self) -> None:
        def shake(batch: Any) -> Any:
            if self.run.rank == 0:
                torch.rand(3)
            factor = torch.rand(())
            return batch.map(lambda shard: times(shard, factor))

        self.before_step = shake

    def a_generator_of_torch_in_the_loss_function(self) -> None:
        own = torch.Generator().manual_seed(3)
        self.loss = lambda model, shard: square(model, times(shard, torch.rand((), generator=own)))

    def a_generator_of_python_behind_a_method(self) -> None:
        draw = random.Random(3).random
        self.loss = lambda model, shard: square(model, times(shard, draw()))

    def a_generator_without_a_seed(self) -> None:
        self.loss = lambda model, shard: square(model, times(shard, np.random.default_rng().random()))

    def the_clock_in_the_loss(self) -> None:
        self.loss = lambda model, shard: square(model, shard) * (1 + time.time() % 1)

    def the_number_of_the_process_in_the_loss(self) -> None:
        self.loss = lambda model, shard: square(model, shard) * (1 + os.getpid() % 1009)

    def noise_for_as_many_samples_as_the_worker_has(self) -> None:
        def shake(batch: Any) -> Any:
            noise = list(torch.randn(len(inputs_of(batch)), 1))
            return batch.map(lambda shard: times(shard, torch.stack([noise.pop() for _ in shard[0]])))

        self.before_step = shake


class Samples(Script):
    cause = Cause.SAMPLES

    def a_data_set_that_counts_its_reads(self) -> None:
        reads = itertools.count(1)
        self.data = Read(lambda inputs: inputs / next(reads))

    def a_data_set_that_changes_samples_where_they_lie(self) -> None:
        self.data = Read(lambda inputs: inputs.mul_(0.5))

    def unseeded_noise_in_the_data_set(self) -> None:
        self.data = Read(lambda inputs: inputs * np.random.default_rng().random())

    def a_data_set_divided_by_rank(self) -> None:
        self.data = Subset(self.data, range(self.run.rank, 22, self.run.world_size))

    def a_data_set_split_without_a_seed(self) -> None:
        self.data = Subset(self.data, np.random.default_rng().permutation(22)[:16].tolist())

    def a_sampler_seeded_by_rank(self) -> None:
        self.sampler = lambda seed, epoch: np.random.default_rng([seed, epoch, self.run.rank]).permutation(22)

    def a_collate_function_that_counts_its_calls(self) -> None:
        calls = itertools.count()
        self.collate = lambda rows: times(stack(rows), 1 + next(calls) % 2)

    def labels_that_each_worker_corrects_for_its_samples(self) -> None:
        labels = self.data.tensors[1]

        def loss(model: nn.Module, shard: Any) -> Tensor:
            labels[shard[2]] = 0.5 * shard[1] + 0.5 * model(shard[0]).detach()
            return square(model, shard)

        self.loss = loss

    def a_data_set_changed_by_the_workers_own_samples(self) -> None:
        self.after_step = lambda batch: self.data.tensors[0].mul_(1 + mean_of(batch))


class Batches(Script):
    cause = Cause.SAMPLES
    job = {"global_batch_size": lambda num_workers: 4 * num_workers}  # noqa: RUF012

    def a_global_batch_that_grows_with_the_workers(self) -> None:
        pass


class Gradients(Script):
    cause = Cause.GRADIENTS

    def a_loss_divided_by_the_workers_batch(self) -> None:
        batch_size = 8 // self.run.world_size
        self.loss = lambda model, shard: (model(shard[0]) - shard[1]).square().sum() / batch_size

    def a_loss_times_the_number_of_workers(self) -> None:
        self.loss = lambda model, shard: square(model, shard) * self.run.world_size

    def a_weight_by_rank(self) -> None:
        self.loss = lambda model, shard: paceline.Mean(square(model, shard), weight=1 + self.run.rank)

    def a_penalty_on_rank_0_alone(self) -> None:
        rate = 0.1 if self.run.rank == 0 else 0.0
        self.loss = lambda model, shard: square(model, shard) + rate * model[0].weight.square().sum()

    def a_hook_on_gradients_of_one_rank(self) -> None:
        if self.run.rank == 1:
            self.model[0].weight.register_hook(lambda gradient: 0.5 * gradient)

    def a_hook_that_clamps_gradients_while_they_accumulate(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)

    def a_backward_pass_in_the_loss_function(self) -> None:
        def loss(model: nn.Module, shard: Any) -> Tensor:
            square(model, shard).backward()
            return square(model, shard)

        self.loss = loss

    def a_layer_frozen_on_one_rank(self) -> None:
        self.model[0].requires_grad_(self.run.rank == 0)


class Rates(Script):
    cause = Cause.RATE

    def a_learning_rate_times_the_number_of_workers(self) -> None:
        self._use(self.model, lr=0.1 * self.run.world_size)

    def a_learning_rate_set_by_the_workers_own_samples(self) -> None:
        self.after_step = lambda batch: self.optimizer.param_groups[0].update(lr=0.1 + 0.01 * mean_of(batch))

    def a_schedule_that_only_rank_0_moves(self) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        if self.run.rank == 0:
            self.after_step = lambda _: schedule.step()

    def a_plateau_of_the_workers_own_samples(self) -> None:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.after_step = lambda batch: plateau.step(mean_of(batch))

    def a_schedule_as_long_as_the_workers_own_batches(self) -> None:
        num_steps = 2 * 22 // (8 // self.run.world_size)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / num_steps)

    def weight_decay_on_one_rank(self) -> None:
        self._use(self.model, weight_decay=0.1 * self.run.rank)


class Updates(Script):
    cause = Cause.UPDATE

    def unseeded_noise_after_each_update(self) -> None:
        self.after_step = lambda _: self.model[0].weight.data.add_(np.random.default_rng().normal())

    def weights_decayed_in_the_forward_pass(self) -> None:
        class Decayed(Net):
            def forward(self, inputs: Tensor) -> Tensor:
                for parameter in self.parameters():
                    parameter.data.mul_(0.99)
                return super().forward(inputs)

        self._use(Decayed())

    def weights_scaled_by_the_workers_own_samples(self) -> None:
        self.after_step = lambda batch: self.model[0].weight.data.mul_(1 + mean_of(batch))

    def the_best_weights_loaded_by_rank_0_alone(self) -> None:
        best = copy.deepcopy(self.model).double().state_dict()
        self.after_step = lambda _: self.run.rank == 0 and self.run.steps == 4 and self.model.load_state_dict(best)

    def a_criterion_with_an_optimizer_of_its_own(self) -> None:
        scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        own = torch.optim.SGD([scale], lr=0.1)
        self.loss = lambda model, shard: (scale * model(shard[0]) - shard[1]).square().mean()
        self.after_step = lambda _: own.step()

    def embeddings_renormalised_in_the_forward_pass(self) -> None:
        self._use(nn.Sequential(nn.Embedding(22, 4, max_norm=0.5), nn.Linear(4, 1)))
        self.loss = lambda model, shard: square(model, [shard[2], shard[1]])


class Buffers(Script):
    cause = Cause.BUFFERS

    def a_buffer_that_the_loss_function_moves_by_rank(self) -> None:
        self.model.register_buffer("level", torch.zeros(1, dtype=torch.float64))
        self.loss = lambda model, shard: square(model, shard) + 0 * model.level.add_(self.run.rank).sum()

    def a_buffer_set_by_the_workers_own_samples(self) -> None:
        self.model.register_buffer("level", torch.zeros(1, dtype=torch.float64))
        self.after_step = lambda batch: self.model.level.fill_(mean_of(batch))

    def a_call_in_training_mode_for_a_log(self) -> None:
        self._use(nn.Sequential(nn.BatchNorm1d(4), *Net()))
        self.after_step = lambda batch: self.model(inputs_of(batch))

    def running_statistics_that_rank_1_forgets_faster(self) -> None:
        self._use(nn.Sequential(nn.BatchNorm1d(4, momentum=0.1 + 0.4 * self.run.rank), *Net()))


class Weights(Script):
    cause = Cause.WEIGHTS

    def a_layer_whose_width_follows_from_the_rank(self) -> None:
        width = 6 + self.run.rank
        self._use(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)))

    def weights_with_a_spread_by_the_number_of_workers(self) -> None:
        nn.init.normal_(self.model[0].weight, std=1 / self.run.world_size)

    def weights_drawn_after_a_draw_for_each_worker(self) -> None:
        torch.rand(self.run.world_size)
        self._use(Net())

    def weights_moved_by_rank_before_the_first_step(self) -> None:
        self.prepared = lambda: self.model[0].weight.data.add_(self.run.rank)


class Steps(Script):
    cause = Cause.STEPS

    def an_end_that_one_rank_asks_for(self) -> None:
        self.after_step = lambda _: self.run.stop("enough") if self.run.rank == 1 and self.run.steps == 3 else None

    def a_batch_that_one_rank_passes_over(self) -> None:
        self.before_step = lambda batch: None if self.run.rank == 1 and self.run.steps == 1 else batch


MISTAKES = cases_of(State, Own, Draws, Samples, Batches, Gradients, Rates, Updates, Buffers, Weights, Steps)
