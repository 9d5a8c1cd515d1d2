"""
train.py trains what a plain loop trains: the settings of an update, which layouts that are compared with each
other would share.
"""

import numpy as np
import pytest
import torch
import witness
from runs import TINY, accepted, column, start_changed

# each setting of an update has an effect within ten steps that is far above rounding
SETTINGS = (
    "--learning_rate=2e-3 --min_lr=5e-4 --warmup_iters=3 --lr_decay_iters=8 --max_iters=9 --weight_decay=0.5 "
    "--beta1=0.8 --beta2=0.9 --grad_clip=0.5 --eval_interval=4 --eval_iters=3 --seed=7"
)
# name: (processes, settings)
CASES = {
    "adamw": (1, ""),
    "ddp": (2, ""),
    "exact": (1, "--exact=True"),
    "muon": (1, "--optimizer=muon"),
    "unclipped": (1, "--optimizer=muon --grad_clip=0"),
    "diloco": (2, "--islands=2 --local_steps=3"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_a_plain_loop(zygote, shared_work, name):
    """Losses, gradient norms, evaluations of both splits, and the weights where one process holds them."""
    nproc, flags = CASES[name]
    args = f"{SETTINGS} {flags}".split()
    zygote.train([*args, f"--out_dir={name}"], shared_work, nproc)
    splits = [np.fromfile(shared_work / f"data/tiny/{split}.bin", np.uint16) for split in ("train", "val")]
    records, weights = witness.train(*splits, **accepted("train.py", *TINY, *args) | {"vocab_size": 65})
    for key, tolerance in (("loss", 2e-6), ("grad_norm", 2e-5), ("train_loss", 2e-6), ("val_loss", 2e-6)):
        expected = {record["iter"]: record[key] for record in records if key in record}
        assert column(shared_work / name, key) == pytest.approx(expected, abs=tolerance), key
    if name != "diloco":
        saved = torch.load(shared_work / name / "ckpt.pt", weights_only=True)["model"]
        assert saved.keys() == weights.keys()
        distances = {key: (saved[key] - weights[key]).norm() / weights[key].norm() for key in saved}
        assert max(distances.values()) < 2e-5, distances


def test_each_step_and_micro_batch_has_other_dropout_masks(zygote, work):
    """Of one window that is read again and again, with weights that do not change."""
    for split in ("train", "val"):
        path = work / f"data/tiny/{split}.bin"
        path.write_bytes(path.read_bytes()[: 2 * (32 + 1)])
    flags = ["--batch_size=1", "--learning_rate=0", "--min_lr=0", "--max_iters=1"]
    losses = {}
    for dropout in (0.0, 0.2):
        for count in (1, 2):
            more = [f"--dropout={dropout}", f"--gradient_accumulation_steps={count}", f"--out_dir={count}"]
            zygote.train([*flags, *more], work)
            losses[dropout, count] = column(work / str(count), "loss")
    assert losses[0.0, 1] == losses[0.0, 2] and len(set(losses[0.0, 1].values())) == 1
    with_masks = [*losses[0.2, 1].values(), *losses[0.2, 2].values()]
    assert len(with_masks) == len(set(with_masks)) == 4


TOLD = """
import torch
use = torch.use_deterministic_algorithms
def told(mode, **options):
    print("deterministic algorithms:", mode)
    use(mode, **options)
torch.use_deterministic_algorithms = told
"""


@pytest.mark.parametrize("flag", ["exact", "deterministic"])
def test_algorithms_are_deterministic(zygote, work, flag):
    """Which changes nothing on a CPU: what a GPU would compute with is asked."""
    run = start_changed(zygote, TOLD, [f"--{flag}=True", "--max_iters=0"], work).wait()
    assert "deterministic algorithms: True" in run.text()
