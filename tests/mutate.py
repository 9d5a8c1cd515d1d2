"""
Take one thing out of the code at a time and see that the tests notice: python tests/mutate.py [NAME ...]

Each mutation is made in a copy of the repository in a temporary folder; a row says which tests went red. Exit status 1
if the suite stayed green for any.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PARITY, RESUME, SURVIVE = "tests/test_parity.py", "tests/test_resume.py", "tests/test_survive.py"
LAUNCH = "tests/test_launch.py"
KILLED = f"{RESUME}::test_killed_twice_and_resumed_has_the_same_bits"

# name: (file, what is there, what takes its place, the tests that must see it)
MUTATIONS = {
    "all-reduce: of the gradients": (
        "parallel.py", "    if ranks.world_size == 1 or is_fsdp(model):\n        return model",
        "    return model", PARITY),
    "all-reduce: in the last micro-step only, dropped": (
        "parallel.py", "and not now else nullcontext", "else nullcontext", PARITY),
    "all-reduce: of the step's loss": (
        "launch.py", "    return rows.view(-1, len(row)).cpu()", "    return mine.expand(dist.get_world_size(), -1).cpu()",
        PARITY),
    "all-reduce: of the evaluation": (
        "train.py", "total = launch.gather_rows([total], ranks.device).sum().item()",
        "total = total * ranks.world_size", PARITY),
    "share: its weight in the gradient": (
        "train.py", "targets_a_rank = tokens_a_step / ranks.world_size",
        "targets_a_rank = share.micro_steps * share.rows * block_size", PARITY),
    "share: missing rows count": (
        "loader.py", "x[missing], y[missing] = 0, -1", "x[missing], y[missing] = 0, 0", PARITY),
    "share: all ranks read the same rows": (
        "loader.py", "(micro_step * self.world_size + self.rank) * self.rows", "micro_step * self.world_size * self.rows",
        PARITY),
    "data: depends on the rank": (
        "train.py", "block_size, seed, loader.TRAIN, step", "block_size, seed + ranks.rank, loader.TRAIN, step", PARITY),
    "evaluation: other sequences each time": (
        "train.py", "seed, stream, 0, wanted)", "seed, stream, iter_num + ranks.world_size, wanted)", PARITY),
    "init: depends on the order of parameters": (
        "model.py", 'f"{seed} {name}"', 'f"{seed} {id(p)}"', "tests/test_model.py"),
    "random state: of a step": ("train.py", "    launch.seed_step(seed, iter_num, ranks.rank)\n", "", KILLED),
    "random state: of the rank": (
        "launch.py", "SeedSequence((seed, step, rank))", "SeedSequence((seed, step, 0))", RESUME),
    "order of the reduction after a start": (
        "parallel.py", "        loss.backward()\n        model.zero_grad", "        model.zero_grad", KILLED),
    "resume: place in the data": ("train.py", "for s in count(step) if", "for s in count(0) if", KILLED),
    "resume: optimizer state": (
        "checkpoint.py", "moments = moments_by_name(model, optimizer) if optimizer else {}", "moments = {}", KILLED),
    "resume: scaler state": (
        "train.py", 'scaler.load_state_dict(kept["scaler"])', "pass", f"{RESUME}::test_float16_scaler_is_saved_and_restored"),
    "resume: best loss so far": (
        "train.py", 'run.get("best_val_loss", math.inf)', "math.inf",
        f"{RESUME}::test_always_save_checkpoint_false_saves_at_an_evaluation_only_where_it_is_best"),
    "resume: metrics cut back": (
        "metrics.py", 'r.get("iter", 0) < resumed_step', "True", KILLED),
    "save: checksum not compared": (
        "checkpoint.py", 'if actual != expected["sha256"]:', "if False:", f"{RESUME}::test_damaged_saves_are_reported_and_passed_over"),
    "save: not whole when it appears": (
        "checkpoint.py", 'unfinished = Path(out_dir) / f"unfinished_{owner[:8]}_step_{step:08d}"',
        'unfinished = Path(out_dir) / f"step_{step:08d}"',
        f"{RESUME}::test_signals_do_not_tear_a_save"),
    "save: weights that are not finite": (
        "train.py", "    if not finite.all():", "    if False:",
        f"{RESUME}::test_nothing_is_saved_from_weights_or_losses_that_are_not_finite"),
    "stop: one rank alone": (
        "train.py", "asked = resilience.any_code(rows[:, 6])", "asked = stop.code()", SURVIVE),
    "stop: nothing saved": ("train.py", "    if keep_last:\n        save()\n", "", SURVIVE),
    "skip: the step is taken": ("train.py", "        not_finite(rows)\n        continue\n", "        pass\n", SURVIVE),
    "hang: nobody is named": ("resilience.py", "before[r] == after[r] and not here[r]", "False", SURVIVE),
    "two runs in a folder": ("checkpoint.py", "    if now != owner:\n", "    if False:\n", SURVIVE),
    "restart: the store of the attempt before": (
        "launch.py", "mine, deadline, pause = uuid.uuid4().hex,", 'mine, deadline, pause = f"again{rank}",', LAUNCH),
    "ranks: not numbered by machine": (
        "launch.py", "key=lambda r: (machines.index(machines[r]), r))", "key=lambda r: r)", "tests/test_launchers.py"),
    "interface: the first that there is": (
        "launch.py", "names = [name for way in ways for name in names if addresses[name] == way][:1] or names",
        "names = names[:1]", "tests/test_launchers.py"),
    "cores: every rank takes all": (
        "launch.py", "len(cores) // sharing", "len(cores)", "tests/test_launchers.py"),
    "attention: later keys are seen": ("model.py", ".triu(1 + i)", ".triu(2 + i)", "tests/test_model.py"),
}  # fmt: skip


def main():
    wanted = sys.argv[1:] or list(MUTATIONS)
    green = []
    for name in wanted:
        file, old, new, tests = MUTATIONS[name]
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "repo"
            shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out*", "*.bin", "__pycache__"))
            text = (copy / file).read_text()
            assert text.count(old) == 1, f"{name}: {text.count(old)} places in {file}"
            (copy / file).write_text(text.replace(old, new))
            start = time.monotonic()
            env = {**os.environ, "ISOGPT_SHARED": str(REPO.parent / "shared")}
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", tests],
                cwd=copy, env=env, capture_output=True, text=True,
            )  # fmt: skip
            red = [
                line.split(" ")[1].split("::")[-1]
                for line in run.stdout.splitlines()
                if line.startswith(("FAILED", "ERROR"))
            ]
            verdict = f"red: {red[0]}" if run.returncode == 1 and red else f"GREEN (exit status {run.returncode})"
            green += [] if run.returncode == 1 and red else [name]
            print(f"| {name} | {verdict} | {time.monotonic() - start:.0f} s |", flush=True)
    sys.exit(bool(green))


if __name__ == "__main__":
    main()
