"""Scripts that look suspicious and are right: each learns the same on any number of workers."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from tests.verify.scripts import INPUTS, TARGETS, Net, Read, Script, cases_of, inputs_of, mean_of, square, times


class ForALog(Script):
    """What is kept, drawn or computed beside the training."""

    def counters_and_lists(self) -> None:
        losses: list[float] = []
        counts = {"calls": 0}

        def loss(model: nn.Module, shard: Any) -> Tensor:
            value = square(model, shard)
            losses.append(value.item())
            counts["calls"] += 1
            return value

        self.loss = loss
        self.after_step = lambda batch: (sum(losses), mean_of(batch))

    def activations_that_a_hook_keeps(self) -> None:
        kept: list[Tensor] = []
        self.model[1].register_forward_hook(lambda *found: kept.append(found[-1].detach()))

    def draws_of_rank_0(self) -> None:
        self._use(nn.Sequential(Net(), nn.Dropout(0.2)))
        self.after_step = lambda _: self.run.rank or (torch.rand(7), np.random.rand(), random.random())

    def a_call_in_evaluation_mode(self) -> None:
        self._use(nn.Sequential(nn.BatchNorm1d(4), *Net()))
        self.after_step = lambda batch: (self.model.eval()(inputs_of(batch)), self.model.train())


class Updates(Script):
    def an_average_of_weights_beside_the_model(self) -> None:
        average = copy.deepcopy(self.model).double().requires_grad_(False)
        self.after_step = lambda _: follow(average, self.model)

    def an_average_of_weights_that_the_run_keeps(self) -> None:
        self.prepared = lambda: self.run.average(0.9)

    def a_copy_of_the_prepared_model_that_follows_it(self) -> None:
        def copy_it() -> None:
            teacher = copy.deepcopy(self.model).requires_grad_(False)
            self.after_step = lambda _: follow(teacher, self.model)

        self.prepared = copy_it

    def a_teacher_that_follows_the_model(self) -> None:
        teacher = self.run.prepare(copy.deepcopy(self.model))
        self.loss = lambda model, shard: square(model, [shard[0], shard[1] + teacher(shard[0])])
        self.after_step = lambda _: follow(teacher, self.model)

    def a_warm_up_by_the_samples_of_the_run(self) -> None:
        self.after_step = lambda _: self.optimizer.param_groups[0].update(lr=0.1 * self.run.samples_seen / 44)

    def a_plateau_of_the_evaluation(self) -> None:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)

        def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {"error": (model(batch[0]) - batch[1]).square().mean(1)}

        self.after_step = lambda _: plateau.step(self.run.evaluate(self.data, measure)["error"])

    def whole_gradients_that_a_hook_of_the_optimizer_changes(self) -> None:
        self.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(self.model.parameters(), 0.01))

    def an_optimizer_with_a_closure(self) -> None:
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.2, max_iter=3)


def follow(average: nn.Module, model: nn.Module) -> None:
    """Move the parameters of `average`."""
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.lerp_(other, 0.1)


class Models(Script):
    def tied_weights(self) -> None:
        self._use(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)))
        self.model[2].weight = self.model[0].weight
        self._use(self.model)

    def a_frozen_layer_that_trains_later(self) -> None:
        self.model[0].requires_grad_(False)
        self.after_step = lambda _: self.model[0].requires_grad_(self.run.steps >= 2)

    def a_model_drawn_by_rank(self) -> None:
        """The weights of rank 0 are everybody's."""
        torch.manual_seed(self.run.rank)
        self._use(Net())

    def batch_norm_and_dropout(self) -> None:
        self._use(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)))

    def recomputed_activations_with_dropout(self) -> None:
        class Recomputed(nn.Sequential):
            def forward(self, inputs: Tensor) -> Any:
                return self[1](checkpoint(self[0], inputs, use_reentrant=False))

        self._use(Recomputed(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3)), nn.Linear(6, 1)))

    def a_mask_that_the_first_call_makes(self) -> None:
        class Masked(Net):
            mask: Tensor | None = None

            def forward(self, inputs: Tensor) -> Any:
                if self.mask is None:
                    self.mask = torch.ones(4, 4, dtype=inputs.dtype).tril()
                return super().forward(inputs @ self.mask)

        self._use(Masked())


class Losses(Script):
    def a_mean_over_other_units(self) -> None:
        def loss(model: nn.Module, shard: Any) -> Any:
            counted = (shard[0] > 0).double().sum(1, keepdim=True)
            errors = (model(shard[0]) - shard[1]).square()
            return paceline.Mean((errors * counted).sum() / counted.sum(), weight=counted.sum())

        self.loss = loss

    def a_contrastive_term_inside_a_shard(self) -> None:
        def loss(model: nn.Module, shard: Any) -> Tensor:
            scores = torch.cdist(model(shard[0]), model(shard[0] + 0.1)).neg()
            return F.cross_entropy(scores, torch.arange(len(scores)))

        self.loss = loss

    def constants_that_the_loss_function_closes_over(self) -> None:
        weights, scale = torch.rand(22, 1, dtype=torch.float64), {"scale": 0.5}
        self.loss = lambda model, shard: square(model, times(shard, weights[shard[2]])) * scale["scale"]

    def a_centre_of_the_global_batch(self) -> None:
        centre = torch.zeros((), dtype=torch.float64)
        self.loss = lambda model, shard: (square(model, [shard[0] - centre, shard[1]]), {"mean": shard[0].mean()})
        self.after_step = lambda _: centre.copy_(self.run.values["mean"])

    def noise_in_the_loss_function(self) -> None:
        self.loss = lambda model, shard: square(model, times(shard, torch.rand(4) + np.random.rand() + random.random()))

    def a_penalty_on_gradients(self) -> None:
        def loss(model: nn.Module, shard: Any) -> Tensor:
            inputs = shard[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            value: Tensor = square(model, shard) + slope.square().mean()
            return value

        self.loss = loss

    def a_penalty_on_weights(self) -> None:
        self.loss = lambda model, shard: square(model, shard) + 0.01 * model[0].weight.square().sum()

    def a_shard_changed_in_place(self) -> None:
        self.loss = lambda model, shard: square(model, [shard[0].sub_(0.5).mul_(2), shard[1]])


class Samples(Script):
    def random_transforms_of_the_data_set(self) -> None:
        self.data = Read(lambda inputs: inputs * torch.rand(4) + np.random.rand() * random.random())

    def numbers_of_dtypes_that_gloo_does_not_know(self) -> None:
        dtypes = (torch.int16, torch.uint16, torch.float8_e4m3fn)
        columns = [torch.arange(22).view(22, 1).to(dtype) for dtype in dtypes]
        self.data = TensorDataset(INPUTS, TARGETS, *columns)
        self.loss = lambda model, shard: square(model, times(shard, sum(one.double() for one in shard[2:]) / 44))

    def noise_that_is_mapped_over_the_batch(self) -> None:
        self.before_step = lambda batch: batch.map(lambda shard: times(shard, 1 + torch.randn_like(shard[0])))

    def a_number_that_a_kept_generator_draws_for_the_whole_batch(self) -> None:
        own = np.random.default_rng(3)

        def scale(batch: Any) -> Any:
            factor = own.random()
            return batch.map(lambda shard: times(shard, factor))

        self.prepared = lambda: self.run.keep("own", own)
        self.before_step = scale

    def a_sampler_of_the_scripts(self) -> None:
        self.sampler = lambda seed, epoch: np.random.default_rng([seed, epoch]).permutation(22)[:19]


HARMLESS = cases_of(ForALog, Updates, Models, Losses, Samples)
