"""
Fault tolerance: signals, NaN, hangs, killed processes, restarts, and the messages if a run cannot continue.
"""

import copy
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from edits import copy_of_repository, edited, edited_train
from runs import FORKED, REPO, TINY, column, records, start_changed, start_faulty, tensors_in, wait_for

from isogpt.launch.signals import Stop
from isogpt.launch.together import gather_numbers
from isogpt.training import optim, optimizer_state
from isogpt.training.step_numbers import StepNumbers
from model import GPT, GPTConfig

OWN = REPO / "tests/own_optimizers.py"


@pytest.fixture
def faulty(zygote, work):
    """Start train.py with faults."""
    return lambda args, nproc=1, **faults: start_faulty(zygote, args, work, nproc, **faults)


def assert_same_tensors(folder, reference):
    torch.testing.assert_close(tensors_in(folder), tensors_in(reference), rtol=0, atol=0)


def apply_to_model(folder, *replacements):
    """A copy of the repository with replacements in model.py."""
    repo = copy_of_repository(folder)
    path = repo / "model.py"
    path.write_text(edited(replacements, path.read_text()))
    return repo


def events(folder, name):
    return [r for r in records(folder) if r.get("event") == name]


# ------------------------------------------------------------------------------------------------------------
# stopping on request


@pytest.mark.parametrize("nproc, args, name", [(1, [], "SIGINT"), (2, ["--zero=3"], "SIGHUP")])
def test_a_signal_saves_the_step_and_a_resume_has_its_bits(faulty, zygote, work, nproc, args, name):
    args = [*args, "--dropout=0.1", "--max_iters=8", "--out_dir=out", "--init_from=auto"]
    run = faulty(args, nproc, WAIT=[[4, nproc - 1]])
    assert run.until(lambda text: "held by the test" in text)
    number = getattr(signal, name)
    run.kill([nproc - 1], number)  # only one rank: all stop together
    assert run.until(lambda text: f"{name}: stopping after this step" in text)
    (work / "go").touch()
    run.wait(ok=False)
    assert run.codes == ([0] * nproc if nproc > 1 else [128 + number]), run.text()
    mark = json.loads((work / "out" / "PREEMPTED").read_text())
    # the ranks learn of the signal when they have launched the next step
    assert mark == {"iter": 6, "reason": name, "steps": 6} and max(column(work / "out", "loss")) == 5
    assert (work / "out" / "step_00000006").is_dir() and events(work / "out", "preempted")
    zygote.train(args, work, nproc)
    assert not (work / "out" / "PREEMPTED").exists()
    zygote.train([*args, "--out_dir=straight"], work, nproc)
    runs.assert_same_run(work / "out", work / "straight")


def test_a_signal_during_an_evaluation_and_during_a_checkpoint(zygote, work):
    long = [*TINY, "--out_dir=out", "--eval_iters=1000000", "--eval_interval=10", "--init_from=auto"]
    short = [*long, "--eval_interval=1000", "--eval_iters=1", "--max_iters=14"]
    assert "M parameters, from scratch\n" in zygote.start(short, work, 2).wait().text()
    # resumes at 15; at 20 it evaluates, which would take hours
    run = zygote.start([*long, "--max_iters=25"], work, 2)
    assert run.until(lambda text: "iter 19:" in text)
    run.kill([0], signal.SIGTERM)
    run.wait()
    assert json.loads((work / "out" / "PREEMPTED").read_text())["iter"] == 20
    assert (work / "out" / "step_00000020").is_dir(), "the state before the evaluation"
    # the evaluation after the last step: the run is not complete, and the next start evaluates once
    last = [*long, "--max_iters=21", "--eval_interval=1000"]
    run = zygote.start(last, work)
    assert run.until(lambda text: "iter 21:" in text)
    run.kill(sig=signal.SIGTERM)
    assert run.wait(ok=False).codes == [143] and "stopped on request before step 22" in run.text()
    assert "step 22: train loss" in zygote.start([*last, "--eval_iters=1"], work).wait().text()
    run = zygote.start([*TINY, "--out_dir=saving", "--save_interval=1", "--max_iters=100000"], work)
    assert run.until(lambda text: text.count("saved") > 5)
    run.kill(sig=signal.SIGTERM)
    assert run.wait(ok=False).codes == [143]
    mark = json.loads((work / "saving" / "PREEMPTED").read_text())
    assert (work / "saving" / f"step_{mark['iter']:08d}").is_dir()


def test_a_second_sigint_exits_at_once_and_keeps_the_checkpoints(faulty, zygote, work):
    args = ["--out_dir=out", "--save_interval=5", "--init_from=auto", "--max_iters=20"]
    run = faulty(args, WAIT=[[12, 0]])
    assert run.until(lambda text: "held by the test" in text)
    wait_for((work / "out" / "step_00000010" / "manifest.json").exists)  # written in the background
    # one within a second of the first counts as the same Ctrl-C
    wait_for(lambda: run.kill(sig=signal.SIGINT) or run.poll())
    assert run.codes == [130] and "stopping after this step" in run.text()
    assert "step 10" in zygote.start([*TINY, *args], work).wait().text()


# train.py on whose clocks each step takes ten seconds more
SLOW_CLOCK = """
import time
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
register_optimizer_step_post_hook(lambda *args: steps.append(10))
for name in ("monotonic", "perf_counter"):
    setattr(time, name, lambda clock=getattr(time, name): clock() + sum(steps))
"""


def test_time_limit(zygote, work):
    args = ["--out_dir=out", "--max_iters=1000000", "--time_limit_s=100"]
    run = start_changed(zygote, SLOW_CLOCK, args, work, 2).wait()
    assert "stopped on request" in run.text() and "done: " not in run.text()
    assert re.search(r"^stopped: \d+ steps in", run.text(), re.M)
    mark = json.loads((work / "out" / "PREEMPTED").read_text())
    assert mark["reason"] == "time_limit_s" and (work / "out" / f"step_{mark['iter']:08d}").is_dir()
    assert 5 < mark["iter"] < 10, "the step that would end later is not taken"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_time_limit_is_counted_from_the_start_of_torchrun(monkeypatch):
    """
    torchrun is the parent process, here the one that started pytest; a restarted worker has begun later.
    """

    def running_s():
        return 1e6 - Stop(time_limit_s=1e6).seconds_left()

    own = running_s()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    read = Path.read_text  # in LXC's containers, /proc/uptime says when the container was started
    monkeypatch.setattr(Path, "read_text", lambda path: "3 2" if path.name == "uptime" else read(path))
    before = running_s()
    age = float(subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getppid())]))
    assert own < before and before - 4 < age < running_s() + 2
    stop = Stop(time_limit_s=running_s() + 100)
    assert stop.decide(torch.tensor([stop.code()])) == 0
    assert stop.decide(torch.tensor([stop.code(step_s=50)])) and stop.reason() == "time_limit_s"


def test_a_stop_before_the_first_checkpoint_does_not_advise_to_resume(zygote, work):
    run = zygote.start([*TINY, "--eval_iters=100000", "--out_dir=out"], work)
    assert run.until(lambda text: "peak:" in text)
    run.kill(sig=signal.SIGTERM)
    assert run.wait(ok=False).codes == [143] and "no checkpoint to resume" in run.text()
    assert "--init_from=resume" not in run.text() and "Traceback" not in run.text()


# ------------------------------------------------------------------------------------------------------------
# not finite


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_ranks(faulty, zygote, work):
    """The weights are bit for bit those of a run without that step, whose checkpoint excludes it."""
    for nproc, zero, kind in ((1, 0, "NAN"), (2, 0, "NAN_BACKWARD"), (2, 1, "NAN_BACKWARD"), (2, 3, "NAN")):
        out, without = work / f"out{nproc}{zero}", work / f"without{nproc}"
        common = ["--max_iters=6", f"--zero={zero}", "--skip_steps=nan", f"--out_dir={out}"]
        run = faulty(common, nproc, **{kind: [[2, nproc - 1], [4, 0]]}).wait()
        assert run.text().count("the step is skipped") == 2
        found = events(out, "not_finite")
        assert [e["iter"] for e in found] == [2, 4]
        assert kind != "NAN" or [e["ranks"] for e in found] == [[nproc - 1], [0]]
        assert sorted(column(out, "loss")) == [0, 1, 3, 5, 6]
        if zero == 0:
            zygote.train(["--max_iters=1", f"--out_dir={without}"], work, nproc)
            (without / "excluded_steps.json").write_text("[2, 4]")
            args = ["--max_iters=6", f"--out_dir={without}", "--init_from=resume"]
            zygote.train(args, work, nproc)
            assert_same_tensors(out, without)
        runs.assert_same_curve(out, without)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", *(f"{OWN}:{name}" for name in ("OnDevice", "Lion"))])
@pytest.mark.parametrize("loss, gradient", [(1.0, math.inf), (math.nan, 0.5), (1.0, 0.5)])
def test_a_step_that_is_not_taken_leaves_weights_and_state_as_they_are(optimizer, loss, gradient):
    """The last one is a spike, since the limits of these numbers are 0."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32))
    optimizers = optim.make_optimizers(model, runs.train_defaults(optimizer=optimizer, learning_rate=1e-2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for each in optimizers:  # a class may make its state in its first step
        each.step()
        each.found_inf = None  # then it decides
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient)
    square = sum(p.grad.double().square().sum() for p in model.parameters())
    facts = {name: 0.0 for name in StepNumbers._fields} | {"loss": loss, "grad_square": square}
    gathered = gather_numbers(StepNumbers(**facts), torch.device("cpu"))
    before = copy.deepcopy((model.state_dict(), optimizer_state.state_by_name(model, optimizers)))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    is_spike = math.isfinite(loss * gradient)
    optim.clip_and_step(optimizers, scaler, gathered, 1.0, skips_spikes=is_spike)
    after = model.state_dict(), optimizer_state.state_by_name(model, optimizers)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all((p.grad == gradient).all() for p in model.parameters()), "for the report"


@pytest.mark.parametrize("nproc, args", [(1, ["--dtype=float16"]), (2, ["--zero=3"])])
def test_data_that_cannot_be_read_end_the_run_whose_state_is_saved(faulty, zygote, work, nproc, args):
    """The state before the step, although the step after it may have been launched; a resume has its bits."""
    args, data = [*args, "--dropout=0.1", "--max_iters=12"], work / "data/tiny/train.bin"
    run = faulty([*args, "--out_dir=out"], nproc, WAIT=[[6, rank] for rank in range(nproc)])
    assert run.until(lambda text: text.count("held by the test") == nproc)
    text = data.read_bytes()
    os.truncate(data, 1000)
    (work / "go").touch()
    run.wait(ok=False)
    assert set(run.codes) == {1} and run.text().count("has been truncated since the start") == 1, run.text()
    data.write_bytes(text)
    last = max(column(work / "out", "loss"))
    assert last >= 5 and (work / "out" / f"step_{last + 1:08d}").is_dir(), "no step was lost"
    zygote.train([*args, "--out_dir=out", "--init_from=resume"], work, nproc)
    zygote.train([*args, "--out_dir=straight"], work, nproc)
    runs.assert_same_run(work / "out", work / "straight")


def test_stopping_reports_rank_step_rows_and_layers(faulty, work):
    """The alert command gets a line of JSON for each event."""
    args = ["--out_dir=out", "--save_interval=4", "--alert_command=cat >> alerts.jsonl"]
    run = faulty(args, 2, NAN=[[6, 1]]).wait(ok=False)
    assert set(run.codes) == {1} and run.text().count("error:") == 1
    said = r"step 6: not finite on rank 1: .*largest gradients transformer\..*\(rank 1\)"
    assert re.search(said, run.text())
    assert [*events(work / "out", "not_finite")[0]["windows"]] == ["1"]
    assert (work / "out" / "step_00000004").is_dir()
    told = [json.loads(line) for line in (work / "alerts.jsonl").read_text().splitlines()]
    assert sorted(event["event"] for event in told) == ["failed", "not_finite", "start"]
    assert next(event for event in told if event["event"] == "not_finite")["ranks"] == [1]


def test_three_steps_in_succession_end_the_run_and_each_resume_leaves_them_out(faulty, zygote, work):
    """By torchrun, by hand and to an older step; as if they had been left out from the start."""
    args = ["--save_interval=3", "--max_iters=14", "--skip_steps=nan", "--keep_last=9"]
    nan = [[step, 1] for step in (7, 8, 9)]
    run = faulty([*args, "--out_dir=out"], 2, NAN=nan).wait(ok=False)
    said = "; each resume leaves out steps 7, 8, 9; no checkpoint was lost: resume with --init_from=resume"
    assert set(run.codes) == {1} and run.text().count(said) == run.text().count("error:") == 1
    assert len(events(work / "out", "not_finite")) == 3 and events(work / "out", "failed")
    torchrun = ["--standalone", "--nproc_per_node=2", "--max-restarts=1", str(REPO / "tests/faulty_train.py")]
    env = {"FAULTS": json.dumps({"NAN": nan})}
    zygote.start([*torchrun, *TINY, *args, "--out_dir=restarted"], work, script=FORKED, env=env).wait()
    zygote.train([*args, "--max_iters=4", "--out_dir=clean"], work, 2)
    shutil.copy(work / "out/excluded_steps.json", work / "clean")
    for folder, start in (("out", "auto"), ("clean", "auto"), ("out", "resume:6")):
        zygote.train([*args, f"--out_dir={folder}", f"--init_from={start}"], work, 2)
        losses = column(work / folder, "loss")
        assert sorted(losses) == [s for s in range(15) if s not in (7, 8, 9)]
        assert losses == column(work / "restarted", "loss"), folder
        assert_same_tensors(work / folder, work / "restarted")


def test_three_steps_in_succession_before_the_first_checkpoint_end_the_run(faulty, work):
    nan = [[step, 0] for step in (2, 3, 4)]
    run = faulty(["--skip_steps=nan", "--out_dir=out"], 2, NAN=nan).wait(ok=False)
    assert set(run.codes) == {1} and run.text().count("error:") == 1
    assert "; start again with a lower --learning_rate\n" in run.text()
    assert not re.search(r"\b(NaN|Infinity)\b", (work / "out/metrics.jsonl").read_text()), "valid JSON"
    assert not (work / "out/excluded_steps.json").exists()


def test_float16_gradients_that_never_become_finite_end_the_run(faulty, work):
    """The scaler handles overflows, until 16 consecutive ones have reduced its scale to 1."""
    args = ["--out_dir=out", "--dtype=float16", "--max_iters=60"]
    run = faulty(args, NAN_BACKWARD=[[s, 0] for s in range(60)]).wait(ok=False)
    assert run.codes == [1] and "error: step 16: not finite on rank 0" in run.text()
    assert sorted(column(work / "out", "loss")) == list(range(16)) and events(work / "out", "failed")


# ------------------------------------------------------------------------------------------------------------
# hangs, killed processes, ranks that differ


def test_a_rank_that_hangs_is_named_by_all_others_and_says_where(faulty, work):
    """It is outside of a collective, in which the others wait."""
    run = faulty(["--out_dir=out", "--zero=3", "--dist_timeout_s=10"], 3, WAIT=[5, 1])
    assert run.until(lambda text: "held by the test" in text)
    wait_for(lambda: run.poll() or None not in (run.codes[0], run.codes[2]))
    run.kill([1])
    run.wait(ok=False)
    assert run.codes[0] == run.codes[2] == 1, run.text()[-2000:]
    assert re.search("error: rank 1 at step 5, forward: no progress for 10 s; rank [02] is", run.text())
    assert ", in wait_for_go\n" in run.text(), "its traceback"
    for rank in (0, 2):
        assert re.search(rf"error: rank {rank} at step 5, .*; rank 1 is at step 5, forward", run.text())
    assert events(work / "out", "failed")


# a watchdog that loses patience with the store a hundred times as fast
IMPATIENT = """
import isogpt.monitor.watchdog as watchdog
watchdog.STORE_TIMEOUT_S = watchdog.BEAT_S = 0.05
real = watchdog.within
def within(limit_s, work, *arguments):
    try:
        return real(limit_s, work, *arguments)
    except TimeoutError:
        print("a beat is late", flush=True)
        raise
watchdog.within = within
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGSTOP")
def test_a_run_goes_on_after_the_rank_that_serves_the_store_was_suspended(zygote, work):
    run = start_changed(zygote, IMPATIENT, [*TINY, "--max_iters=200", "--out_dir=out"], work, 2)
    assert run.until(lambda text: "iter 5:" in text)
    run.kill([0], signal.SIGSTOP)
    before = run.text().count("a beat is late")
    assert run.until(lambda text: text.count("a beat is late") > before + 20)
    run.kill([0], signal.SIGCONT)
    run.wait()
    assert max(column(work / "out", "loss")) == 200 and "error" not in run.text()


# ------------------------------------------------------------------------------------------------------------
# what a step changes differently on each rank, or where no checkpoint can save it


DIFFERENT = (
    "weights differ across ranks: {}: each rank has drawn other random numbers, or has changed weights in "
)
# steps that change no weights do not count: {faults: (args, step before which weights are compared)}
FIRST = {
    "the first": ({"DIFFER": [0, 1]}, [], 1),
    "after a skipped step": ({"NAN": [0, 0], "DIFFER": [1, 1]}, ["--skip_steps=nan"], 2),
    "after an overflow": ({"OVERFLOW": [0, 0], "DIFFER": [1, 1]}, ["--dtype=float16"], 2),
}


@pytest.mark.parametrize("name", FIRST)
def test_weights_that_differ_after_the_first_step_of_a_launch_end_it(faulty, name):
    faults, args, step = FIRST[name]
    run = faulty([*args, "--out_dir=out"], 2, **faults).wait(ok=False)
    differ = DIFFERENT.format("transformer.wte.weight differs on rank 1")
    assert run.codes == [1, 1] and f"error: step {step}: {differ}" in run.text(), run.text()
    assert run.text().count("error:") == 1 and "Traceback" not in run.text()


def test_weights_are_compared_again_after_a_resume(faulty, work):
    args = ["--out_dir=out", "--init_from=auto"]
    faulty([*args, "--max_iters=3"], 2, DIFFER=[2, 5]).wait()  # on no rank
    run = faulty([*args, "--max_iters=9"], 2, DIFFER=[[4, 1]]).wait(ok=False)
    assert "error: step 5: weights differ across ranks: " in run.text()
    run = faulty([*args, "--max_iters=9"], 2, DIFFER=[[6, 1]]).wait()
    assert "differ" not in run.text(), "only after the first step"


GRADIENT_NOISE = (
    '    clock.lap("reduce")\n',
    "    for p in raw_model.parameters():\n        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)\n",
)


@pytest.mark.parametrize("exact", [False, True])
def test_noise_that_each_rank_draws_by_itself_ends_the_run(zygote, work, exact):
    repo = edited_train(work, (GRADIENT_NOISE[0], GRADIENT_NOISE[1] + GRADIENT_NOISE[0]))
    run = zygote.train([f"--exact={exact}", "--out_dir=out"], work, 2, repo=repo, ok=False)
    assert re.search(
        "^error: step 1: weights differ across ranks: .* and 12 more: each rank has drawn", run.text(), re.M
    )


FREE = "freeze=False)\n        with"


@pytest.mark.parametrize("exact", [False, True])
def test_weights_that_a_forward_pass_changes_end_the_run(zygote, work, exact):
    """Each rank shortens the embeddings of the tokens that it has read."""
    (work / "short.py").write_text("batch_size = 1\ngradient_accumulation_steps = 2\neval_interval = 100\n")
    repo = apply_to_model(work / "edited", (FREE, FREE.replace("False)", "False, max_norm=0.05)")))
    args = ["short.py", "--arch=llama", f"--exact={exact}"]
    run = zygote.train(args, work, 2, repo=repo, ok=False)
    differ = DIFFERENT.format("transformer.wte.weight differs on rank 1")
    assert f"error: step 1: {differ}the forward pass\n" in run.text()


# a schedule that counts calls, in MLP
GELU = "        self.gelu = config.gelu\n"
COUNT = "        hidden = self.c_fc(x, *counts)  # (..., n_hidden)\n"


@pytest.mark.parametrize("nproc, args", [(1, []), (2, ["--zero=3"]), (2, ["--pp=2"])])
def test_a_python_value_that_steps_change_ends_the_run(zygote, work, nproc, args):
    changes = [
        (GELU, GELU + "        self.calls = 0\n"),
        (COUNT, "        self.calls += self.training\n" + COUNT),
    ]
    repo = apply_to_model(work / "edited", *changes)
    run = zygote.train([*args, "--out_dir=out"], work, nproc, repo=repo, ok=False)
    (message,) = re.findall("^error: .*", run.text(), re.M)
    changed = (
        r"error: a step changes model\.transformer\.h\.[0-9]\.mlp\.calls, a Python value, from \d+ to \d+: "
    )
    assert re.match(changed, message) and "self.step" in message and max(column(work / "out", "loss")) == 1


def test_python_values_that_steps_leave_as_they_are(zygote, work):
    """Nor those that the first step sets."""
    changes = [
        (GELU, GELU + "        self.calls = None\n"),
        (COUNT, "        self.calls = self.step = [1, 2]\n" + COUNT),
    ]
    repo = apply_to_model(work / "edited", *changes)
    zygote.train(["--stats_interval=1", "--sample_interval=1"], work, repo=repo)


# a config file with which each rank uses folders of its own; the data of rank 2 is different
OWN = """
import os
rank = int(os.environ["RANK"])
out_dir, mirror = f"out{rank}", f"memory://key:secret@copies{rank}"
dataset = eval_datasets = f"data/of_{rank}/tiny"
"""


def test_ranks_must_start_with_the_same_data(zygote, work):
    """Names of folders and URLs may differ."""
    (work / "own.py").write_text(OWN)
    for rank in range(3):
        shutil.copytree(work / "data/tiny", work / f"data/of_{rank}/tiny")
    ids = np.fromfile(work / "data/of_2/tiny/train.bin", np.uint16)
    ids[::-1].tofile(work / "data/of_2/tiny/train.bin")
    run = zygote.train(["own.py"], work, 3, ok=False)
    assert set(run.codes) == {1} and run.text().count("error:") == 1
    assert re.search(r"the data's digest is '\w+' on rank 0.*, '\w+' on rank 2", run.text())


# the digest of the code, again after each change of it; the layer is imported twice
DIGESTS = """
import importlib, shutil, sys, torch
from pathlib import Path
from isogpt.launch.process_group import Ranks
from isogpt.launch.start_checks import check_start
alone = Ranks(0, 1, torch.device("cpu"), "gloo")
print(check_start(alone, {}))
for name in ("new.py", "isogpt/__init__.py", "isogpt/monitor/new.py", "compare.py"):
    shutil.copyfile("model.py", name)
    print(check_start(alone, {}))
for line in ("a = 1", "a = 2"):
    for name in ("layers/gate.py", "env/lib/package.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(line)
    sys.prefix, sys.path = str(Path("env").resolve()), [*sys.path, "env/lib"]
    importlib.invalidate_caches()
    import layers.gate, package
    print(check_start(alone, {}))
Path("env/lib/package.py").write_text("a = 3")
print(check_start(alone, {}))
"""


def test_the_digest_of_the_code_covers_the_scripts_all_rooms_and_loaded_modules(zygote, tmp_path):
    shutil.copytree(REPO / "isogpt", tmp_path / "isogpt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "model.py", tmp_path)
    (tmp_path / "digests.py").write_text(DIGESTS)
    digests = zygote.start([], tmp_path, script="digests.py", repo=tmp_path).wait().text().split()
    assert len({*digests[:4]}) == 4 and digests[4] == digests[3], "compare.py trains nothing"
    assert len({*digests[4:7]}) == 3, "a layer in a folder of its own, and a change of it"
    assert digests[7] == digests[6], "the packages of an environment in the folder are not the run's code"


# a config file with which rank 1 is slower than the others, and uses 2 GB more
SLOW = """
import os, time, torch
if os.environ["RANK"] == "1":
    memory = torch.ones(2**29)
    torch.nn.modules.module.register_module_forward_pre_hook(slow := lambda module, args: time.sleep(0.002))
"""


def test_slow_ranks_are_reported_once(zygote, work):
    (work / "slow.py").write_text(SLOW)
    text = zygote.train(["slow.py", "--max_iters=40", "--save_checkpoint=False"], work, 3).text()
    assert len(re.findall(r"a slow rank: rank 1: forward ms [\d.]+, others [\d.]+", text)) == 1
    assert len(re.findall(r"a slow rank: rank 1: memory GB [\d.]+, others [\d.]+", text)) == 1


def test_a_run_stops_when_a_different_run_has_claimed_its_folder(faulty, zygote, work):
    args = ["--out_dir=out", "--save_interval=5", "--max_iters=20", "--init_from=auto"]
    first = faulty(args, WAIT=[[12, 0]])
    assert first.until(lambda text: "held by the test" in text)
    # it is written in the background, and reported only after step 12
    wait_for(lambda: (work / "out/step_00000010/manifest.json").exists())
    (work / "out/owner").unlink()  # else the second start would be refused
    zygote.start([*TINY, *args], work).wait()
    before = shutil.copytree(work / "out", work / "before", symlinks=True)
    (work / "go").touch()
    assert first.wait(ok=False).codes == [1] and "a different run was started in out" in first.text()
    # the steps that the first one has taken since then are not in the log of the second
    logged = [r["iter"] for r in records(work / "out") if "loss" in r]
    assert logged == [*range(21)] and records(work / "out")[-1]["event"] == "end"
    assert_same_tensors(work / "out", before)


@pytest.mark.slow
def test_a_rank_that_crashes_is_noticed_without_the_backend(faulty):
    """
    NCCL does not notice that a different rank has failed. Here the survivors wait outside of any collective,
    so that gloo does not notice either, and dist_timeout_s is ten minutes.
    """
    run = faulty(["--out_dir=out"], 3, WAIT=[[7, 0], [7, 2]], CRASH=[7, 1])
    assert run.gone(within=120) and run.codes == [1, 1, 1]
    cause = r"a different rank has failed; rank 1 has failed \(RuntimeError: a bug\)"
    for rank in (0, 2):
        assert re.search(rf"error: rank {rank} at step 7, .*{cause}", run.text())
