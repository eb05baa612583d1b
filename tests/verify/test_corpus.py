"""`paceline verify` of scripts that know nothing of Paceline, in seven styles: a right one is equal, of a wrong one the
first difference and its cause are named.

Scripts run here in forked processes; `test_command` has the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline import env
from paceline.verify import observe
from paceline.verify.comparison import ParityVerdict, compare
from paceline.verify.records import ObservedRun, load
from tests.kit.workers import run_ranks

CORPUS = Path(__file__).with_name("corpus")
BATCH, NUM_STEPS = 8, 4
WHOLE_BATCHES = {"ddp_batch_not_divided", "trainer_batch_not_divided"}
"""Scripts besides those of tensor parallelism whose ranks are told the global batch."""
EXPECTED = {
    "ddp_no_sampler": ("samples", "given the same samples"),
    "ddp_shuffled_by_rank": ("samples", "order of its own"),
    "ddp_set_epoch_on_rank_0": ("samples", "order of its own"),
    "ddp_batch_not_divided": ("samples", "16 samples instead of 8: each rank takes as many"),
    "ddp_last_batch_filled": ("samples", "1 of 6 samples are read once more"),
    "ddp_mean_over_tokens_of_each_rank": ("loss", "a mean of means.* tokens"),
    "ddp_sum_of_losses": ("loss", "0.5 of what it should be.* a sum over a worker's samples"),
    "ddp_loss_divided_by_the_ranks": ("loss", "0.5 of what it should be: it is divided by the number of workers"),
    "ddp_places_come_first": ("loss", "0.5 of what it should be: it is divided by the number of workers"),
    "ddp_label_smoothing_by_rank": ("loss", "another one on some ranks"),
    "ddp_loss_scaled_on_rank_1": ("loss", "scaled otherwise on some ranks: on rank 1 it is 10 times"),
    "ddp_contrastive_within_a_rank": ("loss", "compares samples with each other"),
    "ddp_head_outside": ("gradients", "of 2 parameters of 4 is not summed"),
    "ddp_inner_model_called": ("gradients", "not summed over the workers"),
    "ddp_no_sync_on_the_last_micro_step": ("gradients", "not summed.* one of 2 micro-steps"),
    "loop_sums_gradients": ("gradients", "2 times as large: summed"),
    "loop_averages_what_ddp_averaged": ("gradients", "divided by the number of workers twice"),
    "loop_clips_before_the_sum": ("gradients", "clipped before they are summed"),
    "loop_steps_before_the_sum": ("gradients", "not summed over the workers when the optimizer makes its step"),
    "loop_sums_before_the_second_backward": ("gradients", "not summed.* one of 2 micro-steps"),
    "loop_weights_not_broadcast": ("initial_weights", "different weights.* nobody broadcasts"),
    "ddp_rate_times_the_ranks": ("learning_rate", "lr grows with the number of workers"),
    "ddp_schedule_stepped_for_each_rank": ("learning_rate", "stepped 2 times an update"),
    "ddp_schedule_as_long_as_the_loader": ("learning_rate", "depends on the number of workers"),
    "ddp_weight_decay_on_rank_1": ("update", "different values of weight_decay"),
    "ddp_step_skipped_on_rank_1": ("update", "rank 1 skips the optimizer's step"),
    "ddp_average_loaded_on_rank_0": ("update", "something beside the optimizer changes weights on some ranks"),
    "ddp_running_mean_of_one_rank": ("buffers", "ranks hold different buffers"),
    "loop_layer_frozen_on_rank_1": ("gradients", "1 parameter of 4 is missing on rank 1"),
    "loop_accumulation_not_divided": ("loss", "micro-steps .* added up and not divided"),
    "fsdp_parameters_ignored": ("gradients", "2 parameters of 4 is not summed.* ignored"),
    "fsdp_clips_by_the_norm_of_a_shard": ("gradients", "by the norm of a shard"),
    "fsdp_mean_over_tokens_of_each_rank": ("loss", "a mean of means"),
    "accelerate_batch_divided_again": ("samples", "4 samples instead of 8.* once more"),
    "accelerate_shuffled_by_default": ("samples", "another order"),
    "accelerate_schedule_stepped_for_each_process": ("learning_rate", "stepped 2 times an update"),
    "accelerate_loader_not_prepared": ("samples", "given the same samples"),
    "lightning_rate_times_the_devices": ("learning_rate", "lr grows"),
    "lightning_sampler_switched_off": ("samples", "given the same samples"),
    "lightning_mean_over_tokens": ("loss", "a mean of means"),
    "fabric_loader_not_set_up": ("samples", "given the same samples"),
    "fabric_loss_times_the_ranks": ("loss", "2 times as large: it is multiplied by the number of workers"),
    "trainer_batch_not_divided": ("samples", "16 samples instead of 8"),
    "trainer_loss_of_its_own": ("loss", "a mean of means"),
    "trainer_tokens_of_one_device": ("loss", "a mean of means"),
    "tp_norm_not_summed": ("gradients", "not summed over the ranks that divide the model"),
    "tp_other_samples_on_each_rank": ("samples", "16 samples instead of 8"),
    "tp_sequences_of_a_whole_input": ("gradients", "0.5 of what it should be: .* ranks that divide the model"),
    "ddp_second_loss_by_local_counts": ("loss", "a mean of means|another one on some ranks"),
    "tp_initialised_after_the_division": ("initial_weights", "begin with other weights than one"),
    "tp_padded_vocabulary": ("initial_weights", "begin with other weights than one"),
    "lightning_autoencoder_with_noise": ("loss", "draws random numbers"),
    "tp_output_not_summed": ("loss", "parts of its output are not summed"),
}


QUICK = {"ddp_mean_over_tokens_of_each_rank", "ddp_step_skipped_on_rank_1", "right_transformer_with_adam"}
"""Those that every change is tested with; each starts three workers."""


def _cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in names]


def _observe(script: Path, arguments: list[str], path: Path) -> None:
    """Ends this process, as where the observer is started by its command."""
    os.environ.update(TORCHELASTIC_RUN_ID="1", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="1")
    os.environ.update(GROUP_RANK="0", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.chdir(path)
    os.environ.update({env.TRACE_DIR: str(path), env.MAX_STEPS: str(NUM_STEPS)})
    sys.argv = ["observe", str(script), *arguments]
    with contextlib.suppress(SystemExit):  # of a run of paceline.init
        observe.main()


def _run(script: Path, num_workers: int, folder: Path) -> ObservedRun:
    text = script.read_text(encoding="utf-8")
    micro_steps = 2 // num_workers if "options.accumulate" in text else 1
    is_whole = script.stem in WHOLE_BATCHES or "tp_" in script.stem or "tensor_parallel" in script.stem
    batch = BATCH if is_whole else BATCH // num_workers // micro_steps
    folder.mkdir()
    arguments = ["--batch", str(batch), "--accumulate", str(micro_steps)]
    run_ranks(_observe, num_workers, script, arguments, folder, timeout_s=90, may_die=range(num_workers))
    return load(folder, num_workers)


def _verdict(name: str, folder: Path) -> ParityVerdict:
    one, two = (_run(CORPUS / f"{name}.py", number, folder / str(number)) for number in (1, 2))
    return compare(one, two)


def test_every_script_is_in_the_table() -> None:
    wrong = {path.stem for path in CORPUS.glob("*.py") if not path.stem.startswith(("right_", "shared"))}
    assert wrong == {*EXPECTED}


@pytest.mark.budget(processor_s=40)
@pytest.mark.parametrize("name", _cases(sorted(path.stem for path in CORPUS.glob("right_*.py"))))
def test_a_right_script_is_equal(name: str, tmp_path: Path) -> None:
    verdict = _verdict(name, tmp_path)
    assert verdict.passed and verdict.steps == NUM_STEPS, verdict.sentence()


@pytest.mark.budget(processor_s=40)
@pytest.mark.parametrize("name", _cases(EXPECTED))
def test_the_first_difference_of_a_wrong_script_and_its_cause_are_named(name: str, tmp_path: Path) -> None:
    verdict = _verdict(name, tmp_path)
    where, words = EXPECTED[name]
    assert verdict.first_difference == where, verdict.sentence()
    assert re.search(words, verdict.cause), verdict.sentence()


OF_PACELINE = """
import torch, paceline

with paceline.init(global_batch_size=8, virtual_shards=2, epochs=2, progress=False) as run:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches([torch.arange(4.0) + number for number in range(16)]):
        run.step(batch, lambda model, shard: model(shard).square().mean())
        assert not torch.nn.functional.dropout(torch.ones(99)).all()
"""


@pytest.mark.budget(processor_s=20)
def test_batch_norm_and_dropout_of_a_run_of_paceline_work_as_without_verify(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(OF_PACELINE)
    found = _run(script, 1, tmp_path / "trace")
    assert found.num_steps == [NUM_STEPS]
    assert all(ranks[0].buffers["0.running_mean"][0] > 1 for ranks in found.steps)
