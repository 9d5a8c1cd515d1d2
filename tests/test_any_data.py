"""Shards, mixtures and windows that begin with a document: the bits of one file, also through kills."""

from pathlib import Path

import pytest
from runs import TINY, records
from test_exact import same_numbers
from test_resume import start_until_step

KEYS = ("loss", "grad_norm", "train_loss", "val_loss")
# two sources, of which the larger one is in shards; 11 steps of 120 sequences go beyond the first 1,000
# sequences, over which the sources are spread
MIXTURE = ["--dataset=shards:0.7,file:0.3", "--data_order=documents", "--gradient_accumulation_steps=4"]
MIXTURE += ["--batch_size=30", "--max_iters=10", "--eval_interval=6", "--save_interval=3", "--dropout=0.1"]


@pytest.mark.slow
def test_a_mixture_that_was_killed_on_2_and_3_ranks_has_the_bits_of_one(
    zygote, session_work, trained, tmp_path
):
    args = [*MIXTURE, "--exact=True"]
    one = trained(args)
    args = [*TINY, *args, f"--out_dir={tmp_path}/killed", "--init_from=auto"]
    for processes, step in ((2, 4), (3, 8)):
        kill_after_a_save(zygote, session_work, args, processes, step)
    zygote.start([*args, "--zero=3"], session_work, 2).wait()
    same_numbers(one, tmp_path / "killed")
    assert resumes(tmp_path / "killed") == 2


def kill_after_a_save(zygote, work, args, processes, step):
    """Start a run, and kill it once it has logged this step and written a checkpoint."""
    out = Path(next(arg for arg in args if arg.startswith("--out_dir=")).removeprefix("--out_dir="))
    run = start_until_step(zygote, work, args, processes, step)
    run.until(lambda text: any(out.glob("step_*")))
    run.kill()
    run.wait(ok=False)


def resumes(folder):
    """How often a run was resumed. If it started again, it would have the same bits too."""
    return [record["event"] for record in records(folder) if "event" in record].count("resume")
