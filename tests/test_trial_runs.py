"""The runs of train.py that bench.py --check compares, with edits of train.py as users make them."""

from dataclasses import dataclass

import pytest
import torch
from edits import after, edited_train
from runs import REPO, Zygote

from configurator import settings_of
from isogpt.check.comparisons import ALONE
from isogpt.lab.combinations import typed
from isogpt.speed.launches import Launches
from isogpt.speed.trial_runs import compare_runs
from isogpt.speed.workload import Workload, described_for_bench
from model import GPT

SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=48, dataset="none")


@dataclass(frozen=True)
class ForkedLaunches(Launches):
    """Launches whose ranks are forked."""

    zygote: Zygote

    def start(self, settings, show=False, limit_s=None):
        nproc = max(1, settings["nproc"])
        words, script = typed(settings | {"nproc": 0}), self.train_py
        run = self.zygote.start(words, self.folder, nproc, script=script).wait(limit_s, ok=False)
        return max(run.codes), run.text()


def rows_of(launches):
    """{name: (state, text)} of bench.py --check for a train.py."""
    described = described_for_bench(settings_of(REPO / "train.py"))
    config = SHAPE | dict(nproc=1, plan=False, tune=False, real_data=False)
    workload = Workload(config, described, torch.device("cpu"), ["cpu"], GPT)
    run = workload.settings | ALONE, workload.model_args()
    return {name: (state, text) for name, state, text in compare_runs(launches, *run)}


FAKE = """
import json, sys
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
nproc, zero, init = int(given["nproc"]), int(given["zero"]), given["init_from"]
loss, evaluated, extra = 4.0, 4.1, 1.0
{edit}
step = {{"step_ms": 100 * nproc, "tokens_per_s": nproc}}
facts = {{"config": {{"seed": 1, "init_from": init}}, "tokens_per_step": 10, "flops_per_step": 1}}
records = [{{"event": "start"}} | facts]
records.append({{"iter": 0, "train_loss": evaluated, "val_loss": 4.2}})
records += [{{"iter": i, "loss": loss, "extra": extra}} | step for i in range(6)]
with open(given["out_dir"] + "/metrics.jsonl", "w") as file:
    file.writelines(json.dumps(record) + "\\n" for record in records)
"""
NAMES = ["train.py", "train.py, resume", "train.py, ddp", "train.py, zero 3"]


@pytest.mark.parametrize(
    "edit, problems",
    [
        ("loss += 1e-6 * (nproc > 1)", ["", "", "", ""]),
        ("loss += 1e-6 * (init != 'scratch')", ["", "loss of step 0 is 4.000001 instead of 4", "", ""]),
        ("extra += 0.01 * (zero == 3)", ["", "", "", "extra of step 0 is 1.01 instead of 1"]),
        (
            "loss = 1.0",
            ["the loss of step 0 is 1.0000, that of an evaluation of the same weights 4.1000"] * 4,
        ),
        ("if nproc: raise KeyError(3)", ["", "", "KeyError: 3", "KeyError: 3"]),
        ("sys.exit('error: no')", ["no"]),
    ],
)
def test_what_runs_record_is_compared(tmp_path, edit, problems):
    """Of a script in place of train.py. What follows from the number of processes is no difference."""
    (tmp_path / "run").mkdir()
    (tmp_path / "train.py").write_text(FAKE.format(edit=edit))
    rows = rows_of(Launches(tmp_path / "train.py", tmp_path, rank=0, is_launched=False))
    assert [*rows] == NAMES[: len(problems)]
    for (state, text), problem in zip(rows.values(), problems, strict=True):
        assert text.startswith(problem) and (state == "holds") == (problem == ""), rows


def test_a_launch_that_does_not_end_is_ended(tmp_path):
    (tmp_path / "train.py").write_text("while True: pass")
    code, errors = Launches(tmp_path / "train.py", tmp_path, rank=0, is_launched=False).start({}, limit_s=1)
    assert code and errors == "error: no result within 1 s\n"


FORWARD = "                    _, loss = model(x, y, gradients.loss_divisor)\n"
NORM = '    clock.lap("reduce")\n'
READ = "            x, y = next(batches)  # (rows, block_size / cp) each\n"
START = "gc.disable()  # a GPU would wait for it; policy.launched and evaluations collect\n"
PENALTY = "                    loss = loss + 1e-3 * sum(p.square().sum() for p in raw_model.parameters())\n"
NOISE = "    for p in raw_model.parameters():\n        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)\n"
COPIES = "{n: p.detach().clone() for n, p in raw_model.named_parameters()}"
PUT = """        for n, p in raw_model.named_parameters():
            p.data.copy_({}[n])
"""
LAUNCHED = "    policy.launched(gathered, lr)\n"
EVALUATE = "        evaluator.run()\n"
EVALUATE_AVERAGE = f"        kept = {COPIES}\n{PUT.format('average')}{EVALUATE}{PUT.format('kept')}"
UPDATE = "    for n, p in raw_model.named_parameters():\n        average[n].lerp_(p.detach(), 0.1)\n"
NANOGPT = """                    _, loss = model(x, y)
                    loss = loss / gradient_accumulation_steps
"""
# {name: (replacements in train.py, a part of the text of each row)}
EDITS = {
    "penalty in the loop": (
        [after(FORWARD, PENALTY)],
        ["", "", "loss of step 0 is", "Tensor and DTensor, need to convert"],
    ),
    "loss of nanoGPT": ([(FORWARD, NANOGPT)], ["", "", "loss of step 0 is", "loss of step 0 is"]),
    "gradient noise": ([(NORM, NOISE + NORM)], ["", "", "weights differ", "grad_norm of step 0 is"]),
    "average by hand": (
        [after(START, f"average = {COPIES}\n"), (EVALUATE, EVALUATE_AVERAGE), (LAUNCHED, UPDATE + LAUNCHED)],
        ["", "train_loss of the evaluation at step 3 is", "", ""],
    ),
    "shorter sequences": (
        [after(READ, "            x, y = x[:, : block_size // 4], y[:, : block_size // 4]\n")],
        ["does a step leave out tokens?"] * 4,
    ),
    "schedule": ([("run.schedule.lr(step)", "learning_rate * min(1.0, (step + 1) / 5)")], ["", "", "", ""]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_what_the_check_says_of_an_edited_train_py(zygote, work, name):
    replacements, problems = EDITS[name]
    edited_train(work, *replacements)
    rows = rows_of(ForkedLaunches(work / "train.py", work, 0, False, zygote))
    assert [*rows] == NAMES
    for (state, text), problem in zip(rows.values(), problems, strict=True):
        assert problem in text and (state == "holds") == (problem == ""), rows
