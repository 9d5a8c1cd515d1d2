"""
Train over settings and seeds: train.py with every combination of values, each run in a separate folder in
out_dir. A setting whose value is a list with commas, such as --seed=1,2,3, is swept. Repeat the command to
continue: complete runs are left alone, and stopped and failed runs continue.

    python sweep.py config/train_small.py --learning_rate=3e-4,1e-3 --seed=1,2,3 --out_dir=out-lr
    python sweep.py config/train_small.py --learning_rate=3e-3,1e-2 --n_layer=2,3 --each --out_dir=out-each
    python sweep.py config/train_small.py --learning_rate=3e-4,1e-3 --out_dir=out-lr --dry_run

Semicolons separate values that contain commas: --shares='2,1;1,1'. --jobs runs are trained at the same time.
"""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import os
import subprocess
import sys
from pathlib import Path

from configurator import apply_arguments, configure, fail, settings_of, with_equals_signs
from isogpt.common.console import print_line, print_result
from isogpt.lab.combinations import folder_name, part_of_task, points_of, read_lists, typed, without
from isogpt.lab.queue import SweptRun, make_slots, time_left, train
from isogpt.training.settings import report

# -- sweep ---------------------------------------------------------------------------------------------------
jobs = 0  # most runs at the same time (0: on GPUs, as many as they suffice for; on a CPU, one) [>= 0]
each = False  # one setting at a time: the first values, then each other value alone, all with every seed
dry_run = False  # list the runs, how far they are and the time that is left; train and write nothing
# ------------------------------------------------------------------------------------------------------------
HERE = Path(__file__).resolve().parent


def make_run(point: dict[str, str]) -> SweptRun:
    """
    Return the run of a point, whose values apply after all other arguments.

    Raises:
        ValueError: one line for each mistake in its settings.
    """
    config, mistakes = apply_arguments(typed(point), base, globals(), train_settings)
    report(mistakes)
    folder = out / folder_name({name: config[name] for name in point})
    weights = config["init_from"].removeprefix("auto:")
    start = "auto" if weights in ("auto", "resume") else f"auto:{weights}"
    fixed = {"init_from": start, "out_dir": str(folder)}
    if config["mirror"]:
        fixed["mirror"] = f"{config['mirror'].rstrip('/')}/{folder.name}"
    run = SweptRun(folder, [*words, *typed(point), *typed(fixed)], config | fixed)
    run.check()
    return run


# ------------------------------------------------------------------------------------------------------------
# the runs: all mistakes are reported before the first one starts
try:
    train_settings, own_settings = settings_of(HERE / "train.py"), settings_of(__file__)
    lists, words = read_lists(with_equals_signs(sys.argv[1:], own_settings | train_settings), train_settings)
    config = configure(globals(), words, extra=train_settings)
    if not lists:
        fail("no setting has several values: type a list such as --seed=1,2,3, or use train.py")
    words = without(words, own_settings)
    base = {name: config.get(name, setting.default) for name, setting in train_settings.items()}
    out = Path(base["out_dir"])
    runs = [*{run.folder: run for run in map(make_run, points_of(lists, each))}.values()]
    part = part_of_task(runs, os.environ)  # of an array job of Slurm
    slots = make_slots(jobs, max(1, *(run.config["nproc"] for run in runs)), base["device"])
    for run in part:
        print_result(f"{run.folder}: {run.state}")
    print_result(f"runs: {len(part)}, in parallel: {len(slots)}, time left: {time_left(part, len(slots))}")
    if dry_run:
        raise SystemExit
    received = train(HERE / "train.py", part, slots)
except (OSError, ValueError) as e:
    fail(str(e))

# ------------------------------------------------------------------------------------------------------------
# the end
missing = [run for run in part if not run.is_complete]
if received:
    print_line(f"runs left: {len(missing)}; to continue, repeat the command")
    raise SystemExit(128 + received[0])
complete = [str(run.folder) for run in runs if run.is_complete]
if complete:
    subprocess.run([sys.executable, str(HERE / "compare.py"), *complete])
if missing:
    fail("\n".join(f"{run.folder}: {run.state}; see its train.log" for run in missing))
