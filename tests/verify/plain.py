"""A training script that knows nothing of Paceline, right as it is; each public method of a subclass is a case that
changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

BATCH, NUM_SAMPLES = 8, 40


def net(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 1)).double()


def data() -> TensorDataset:
    inputs = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(NUM_SAMPLES) % 5 + 1)


class PlainScript:
    """DDP over a small model, with a sampler that is divided over the ranks."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.batch_size = BATCH // self.world_size
        self.dataset: Dataset[Any] = data()
        self.drop_last, self.shuffles, self.seed = True, True, 0
        self.is_sampled = True
        self.model: nn.Module = net()
        self.wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel
        self.optimizer: Callable[[Any], torch.optim.Optimizer] = lambda some: torch.optim.SGD(
            some, lr=0.1, momentum=0.9
        )
        self.loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
        self.before_step: Callable[[nn.Module], object] = lambda _: None
        self.after_step: Callable[[nn.Module, torch.optim.Optimizer, int], object] = lambda *_: None
        self.micro_steps = 1

    def loader(self) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] | None = None
        if self.is_sampled:
            sampler = DistributedSampler(self.dataset, shuffle=self.shuffles, seed=self.seed, drop_last=self.drop_last)
        return DataLoader(self.dataset, batch_size=self.batch_size, sampler=sampler, drop_last=self.drop_last)

    def train(self) -> None:
        model = self.wrap(self.model)
        optimizer = self.optimizer(model.parameters())
        number = 0
        for _ in range(2):
            for batch in self.loader():
                (self.loss(model, batch) / self.micro_steps).backward()
                number += 1
                if number % self.micro_steps == 0:
                    self.before_step(model)
                    optimizer.step()
                    optimizer.zero_grad()
                    self.after_step(model, optimizer, number)


def sum_gradients(model: nn.Module, divide_by: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= divide_by


def mean_of_tokens(losses: Tensor, counts: Tensor) -> Tensor:
    return (losses.squeeze(1) * counts).sum() / counts.sum()


def per_sample(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="none")


class Right(PlainScript):
    def ddp(self) -> None:
        pass

    def an_all_reduce_of_its_own(self) -> None:
        self.wrap = lambda model: model
        self.before_step = lambda model: sum_gradients(model, self.world_size)

    def fsdp_2(self) -> None:
        def wrap(model: nn.Module) -> nn.Module:
            mesh = init_device_mesh("cpu", (self.world_size,))
            fully_shard(model, mesh=mesh)
            return model

        self.wrap = wrap

    def fsdp_1(self) -> None:
        self.wrap = lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

    def tensor_parallel(self) -> None:
        def wrap(model: nn.Module) -> nn.Module:
            mesh = init_device_mesh("cpu", (self.world_size,))
            return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

        self.wrap, self.is_sampled, self.batch_size = wrap, False, BATCH

    def accumulation(self) -> None:
        """Two micro-steps of one worker, as two workers make one of each."""
        self.shuffles = False
        self.micro_steps = 2 // self.world_size
        self.batch_size = BATCH // 2

    def tokens_counted_over_all_workers(self) -> None:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            counts = batch[2].sum().double()
            dist.all_reduce(counts)
            total: Tensor = (per_sample(model, batch).squeeze(1) * batch[2]).sum() * self.world_size / counts
            return total

        self.loss = loss

    def a_schedule_by_steps_and_clipping_after_the_sum(self) -> None:
        self.before_step = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        self.after_step = lambda _, optimizer, number: optimizer.param_groups[0].update(lr=0.1 / (1 + number))

    def adamw_with_an_unused_layer(self) -> None:
        self.model.add_module("unused", nn.Identity())
        self.optimizer = lambda some: torch.optim.AdamW(some, lr=1e-3)

    def lbfgs(self) -> None:
        """An optimizer whose step is given a closure, as Lightning's always is."""

        def train() -> None:
            model = DistributedDataParallel(self.model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in self.loader():

                def closure(batch: Any = batch) -> Tensor:
                    optimizer.zero_grad()
                    loss = self.loss(model, batch)
                    loss.backward()
                    return loss

                optimizer.step(closure)

        self.train = train  # type: ignore[method-assign]


class Libraries(PlainScript):
    """The same training as users of these libraries write it, without shuffling."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffles = False

    def accelerate(self) -> None:
        from accelerate import Accelerator

        def train() -> None:
            accelerator = Accelerator(cpu=True)
            loader = DataLoader(self.dataset, batch_size=self.batch_size)
            model, optimizer, loader = accelerator.prepare(self.model, self.optimizer(self.model.parameters()), loader)
            for batch in loader:
                accelerator.backward(self.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()

        self.train = train  # type: ignore[method-assign]

    def fabric(self) -> None:
        from lightning.fabric import Fabric

        def train() -> None:
            fabric = Fabric(accelerator="cpu", devices=self.world_size, strategy="ddp")
            fabric.launch()
            model, optimizer = fabric.setup(self.model, self.optimizer(self.model.parameters()))
            loader = fabric.setup_dataloaders(DataLoader(self.dataset, batch_size=self.batch_size))
            for batch in loader:
                fabric.backward(self.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()

        self.train = train  # type: ignore[method-assign]

    def lightning(self) -> None:
        import lightning

        outer = self

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = outer.model

            def training_step(self, batch: Any, _: int) -> Tensor:
                return outer.loss(self.inner, batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return outer.optimizer(self.parameters())

        def train() -> None:
            trainer = lightning.Trainer(
                accelerator="cpu", devices=self.world_size, strategy="ddp" if self.world_size > 1 else "auto",
                max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, use_distributed_sampler=False,
            )  # fmt: skip
            trainer.fit(Module(), self.loader())  # Lightning's own sampler shuffles on two workers, and not on one

        self.train = train  # type: ignore[method-assign]

    def transformers_trainer(self) -> None:
        import transformers

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = net()

            def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
                outputs = self.inner(inputs)
                return {"loss": F.mse_loss(outputs, labels), "logits": outputs}

        class Rows(Dataset[Any]):
            def __len__(self) -> int:
                return NUM_SAMPLES

            def __getitem__(self, number: int) -> Any:
                inputs, labels, _ = data()[number]
                return {"inputs": inputs, "labels": labels}

        def train() -> None:
            options = transformers.TrainingArguments(
                "unused", per_device_train_batch_size=self.batch_size, max_steps=4, use_cpu=True, report_to=[],
                save_strategy="no", disable_tqdm=True, optim="sgd", seed=0,
            )  # fmt: skip
            transformers.Trainer(Model(), options, train_dataset=Rows()).train()

        self.train = train  # type: ignore[method-assign]


class Expected(PlainScript):
    """What differs with good reason: equal without batch norm and dropout."""

    def batch_norm(self) -> None:
        self.model = net(nn.BatchNorm1d(8))

    def dropout(self) -> None:
        self.model = net(nn.Dropout(0.3))


class Wrong(PlainScript):
    """The docstring of each is what the verdict says: where, and words of the cause."""

    def no_sampler(self) -> None:
        """samples: ranks were given the same samples"""
        self.is_sampled = False

    def a_batch_that_is_not_divided(self) -> None:
        """samples: the global batch has 16 samples instead of 8"""
        self.batch_size = BATCH

    def shuffled_by_rank(self) -> None:
        """samples: the samples come in another order"""
        self.seed = self.rank

    def samples_repeated_at_the_end(self) -> None:
        """samples: samples instead of|read twice"""
        self.dataset, self.drop_last, self.shuffles = torch.utils.data.Subset(self.dataset, range(11)), False, False

    def noise_by_rank(self) -> None:
        """samples: no sample of this step"""
        tensors = data().tensors
        self.dataset = TensorDataset(tensors[0] + 0.01 * self.rank + 0.02 * self.world_size, *tensors[1:])

    def no_sum(self) -> None:
        """gradient: the gradient is not summed"""
        self.wrap = lambda model: model

    def a_sum_that_is_no_mean(self) -> None:
        """gradient: all gradients are 2 times as large"""
        self.wrap = lambda model: model
        self.before_step = lambda model: sum_gradients(model, 1)

    def divided_twice(self) -> None:
        """gradient: divided by the number of workers twice"""
        self.loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1]) / self.world_size

    def a_mean_of_means_over_tokens(self) -> None:
        """gradient: a mean of means: the loss of each worker"""
        self.loss = lambda model, batch: mean_of_tokens(per_sample(model, batch), batch[2])

    def ranks_with_different_numbers_of_samples(self) -> None:
        """gradient: a mean of means: ranks have 5, 3 samples"""
        self.is_sampled = False

        def loader() -> Any:
            for inputs, targets, counts in DataLoader(self.dataset, batch_size=BATCH):
                own = slice(None) if self.world_size == 1 else (slice(0, 5), slice(5, None))[self.rank]
                yield inputs[own], targets[own], counts[own]

        self.loader = loader  # type: ignore[method-assign]

    def one_layer_outside_of_ddp(self) -> None:
        """gradient: the gradient of 2 parameters of 6 is not summed"""
        head = nn.Linear(6, 1).double()
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.optimizer = lambda some: torch.optim.SGD([*some, *head.parameters()], lr=0.1)
        self.loss = lambda model, batch: F.mse_loss(model(batch[0]) + head(batch[0]), batch[1])

    def a_last_micro_step_under_no_sync(self) -> None:
        """gradient: the last of 2 micro-steps"""
        self.shuffles, self.micro_steps, self.batch_size = False, 2, BATCH // 2 // self.world_size
        inner = self.loss

        def loss(model: Any, batch: Any) -> Tensor:
            with model.no_sync():
                return inner(model, batch)

        self.loss = loss

    def clipping_before_the_sum(self) -> None:
        """gradient: clipped before they are summed"""
        self.wrap = lambda model: model

        def clip_and_sum(model: nn.Module) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            sum_gradients(model, self.world_size)

        self.before_step = clip_and_sum

    def a_rate_times_the_workers(self) -> None:
        """learning rate: grows with the number of workers"""
        self.optimizer = lambda some: torch.optim.SGD(some, lr=0.1 * self.world_size)

    def a_schedule_that_rank_0_alone_moves(self) -> None:
        """learning rate: ranks have different values"""
        self.after_step = lambda _, optimizer, number: self.rank or optimizer.param_groups[0].update(lr=0.1 / number)

    def a_schedule_as_long_as_the_loader(self) -> None:
        """learning rate: depends on the number of workers"""
        self.is_sampled, self.wrap = True, DistributedDataParallel
        length = NUM_SAMPLES // self.batch_size
        self.after_step = lambda _, optimizer, number: optimizer.param_groups[0].update(
            lr=0.1 * (1 - number / 4 / length)
        )

    def weight_decay_on_one_rank(self) -> None:
        """option 'weight_decay' of the optimizer: ranks have different values"""
        self.optimizer = lambda some: torch.optim.SGD(some, lr=0.1, weight_decay=0.1 * self.rank)

    def a_step_that_one_rank_undoes(self) -> None:
        """weight before the step: beside the optimizer changes weights on some ranks"""
        self.after_step = lambda model, *_: self.rank and model.module[0].weight.data.mul_(0.5)

    def weights_of_their_own(self) -> None:
        """initial weights: ranks begin with different weights"""
        torch.manual_seed(self.rank)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.wrap = lambda model: model
        self.before_step = lambda model: sum_gradients(model, self.world_size)

    def weights_scaled_by_the_workers(self) -> None:
        """initial weights: workers begin with other weights than one"""
        self.model[0].weight.data.mul_(self.world_size)  # type: ignore[index]

    def a_counter_that_rank_0_alone_moves(self) -> None:
        """buffer: ranks hold different buffers"""
        self.model.register_buffer("level", torch.zeros(1, dtype=torch.float64))

        def move(*_: Any) -> None:
            self.model.level.add_(self.rank)  # type: ignore[operator]

        self.model.register_forward_pre_hook(move)
        self.wrap = lambda model: DistributedDataParallel(model, broadcast_buffers=False)

    def an_update_that_two_workers_leave_out(self) -> None:
        """weight: the update was left out"""

        class Lazy(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                if dist.get_world_size() == 1:
                    super().step(closure)

        self.optimizer = lambda some: Lazy(some, lr=0.1)
