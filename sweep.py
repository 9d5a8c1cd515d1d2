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
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from configurator import apply_arguments, configure, fail, settings_of, with_equals_signs
from isogpt.checkpoint.manifest import is_run
from isogpt.common import console
from isogpt.lab import combinations
from isogpt.lab.forecast import print_forecast
from isogpt.lab.queue import Queue
from isogpt.lab.slots import make_slots
from isogpt.lab.swept_runs import (
    SweptRun,
    incomplete,
    problem_of_folder,
    problems_of_settings,
    read_state,
    resumable,
)
from isogpt.launch.device import pick_device
from isogpt.launch.launchers import adopt_launcher_variables
from isogpt.parallel.plan import normalized
from isogpt.training.settings import report
from model import GPT

# -- sweep ---------------------------------------------------------------------------------------------------
jobs = 0  # runs at the same time (0: on GPUs, as many as they suffice for; on a CPU, one) [>= 0]
each = False  # one setting at a time: the first values, then each other value alone, all with every seed
dry_run = False  # list the runs, how far they are and the time they will take; train and write nothing
# ------------------------------------------------------------------------------------------------------------
SWEEP_PY = Path(__file__).resolve()
TRAIN_PY = SWEEP_PY.with_name("train.py")
COMPARE_PY = SWEEP_PY.with_name("compare.py")


def read_runs(words: list[str], points: list[combinations.Point], out: Path) -> list[SweptRun]:
    """
    Return the run of each point, with the settings that train.py will have.

    Raises:
        ValueError: one line for each mistake in the settings.
    """
    runs, problems = [], {}
    defaults = {name: setting.default for name, setting in train_settings.items()}
    for point in points:
        name = combinations.folder_name(point, train_settings)
        arguments = combinations.words_of(words, point, train_settings)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # configs have printed their notes
            config, mistakes = apply_arguments(arguments, defaults, {"__file__": __file__}, train_settings)
        mistakes += [
            f"{swept} is {config[swept]} in a config after --{swept}: type --{swept}= after the config"
            for swept, text in point.items()
            if config[swept] != train_settings[swept].parse(text)
        ]
        config |= {"init_from": resumable(config["init_from"]), "out_dir": str(out / name)}
        problems[name] = mistakes or problems_of_settings(config)
        arguments += [f"--{setting}={config[setting]}" for setting in ("init_from", "out_dir")]
        if config["mirror"]:
            arguments.append(f"--mirror={config['mirror'].rstrip('/')}/{name}")
        runs.append(SweptRun(name, out / name, arguments, normalized(config)))
    report(combinations.problems_by_run(problems))
    return runs


def compare(runs: list[SweptRun]) -> int:
    """Print compare.py's table and draw its picture; returns its exit status."""
    if not COMPARE_PY.exists():
        console.print_to_stderr(f"note: the runs are not compared, since {COMPARE_PY} is missing")
        return 0
    console.flush()
    try:
        return subprocess.run(
            [sys.executable, str(COMPARE_PY), *(str(run.folder) for run in runs)]
        ).returncode
    except KeyboardInterrupt:
        return 130


# ------------------------------------------------------------------------------------------------------------
# the runs: every mistake is reported before the first one starts
try:
    adopt_launcher_variables()  # translates srun's and mpirun's variables to torchrun's
    train_settings = settings_of(TRAIN_PY)
    words = with_equals_signs(sys.argv[1:], settings_of(SWEEP_PY) | train_settings)
    swept = combinations.swept_settings(words, train_settings)
    report(combinations.problems_of_lists(swept, train_settings))
    first_values = {name: values[0] for name, values in swept.items()}
    first = combinations.words_of(words, first_values, train_settings)
    config = configure(globals(), first, extra=train_settings)
    if "RANK" in os.environ:
        report(
            ["sweep.py starts the processes of its runs: start it without a launcher, perhaps with --nproc="]
        )
    if not swept:
        report(["no setting has several values: type a list such as --seed=1,2,3, or use train.py"])
    out = Path(config.get("out_dir", train_settings["out_dir"].default))
    if is_run(str(out)) or out.is_file():
        what = "is a file" if out.is_file() else "contains a run"
        report([f"out_dir {out} {what}: set --out_dir= to a folder for the runs of the sweep"])
    of_sweep = tuple(f"--{name}=" for name in settings_of(SWEEP_PY))
    words = [word for word in words if not word.startswith(of_sweep)]
    runs = read_runs(words, combinations.points_of(swept, each), out)
    # under Slurm, the part of this task of an array job
    part = [runs[number] for number in combinations.part_of_task(len(runs), os.environ)]
    report(combinations.problems_by_run({run.name: [problem_of_folder(run)] for run in part}))
    on_device = runs[0].config["device"]
    pick_device(on_device, 0, 1)  # is it available?
    slots = make_slots(jobs, max(run.processes for run in runs), on_device)
except ValueError as e:
    fail(str(e))
except KeyboardInterrupt:
    raise SystemExit(130) from None

# ------------------------------------------------------------------------------------------------------------
# train them
if dry_run:
    try:
        print_forecast(part, len(slots), TRAIN_PY.parent, GPT)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit
waiting = incomplete(part)
of_task = f", {len(part)} of them in this task of the array job" if len(part) < len(runs) else ""
console.print_line(
    f"{console.count_text(len(runs), 'run')} in {out}{of_task}: {len(part) - len(waiting)} complete, "
    f"{len(waiting)} to train, {len(slots)} at the same time"
)
queue = Queue(TRAIN_PY, waiting, slots)
queue.train()

# the end
missing = incomplete(part)
if queue.received:
    command = shlex.join(["python", *sys.argv])
    console.print_line(
        f"stopped with {len(missing)} of {len(part)} runs left; to continue, repeat the command:\n{command}"
    )
    raise SystemExit(128 + queue.received[0])
complete = [run for run in runs if read_state(run).is_complete]
if len(complete) + len(missing) < len(runs):
    console.print_line(f"complete: {len(complete)} of {len(runs)} runs; other tasks train the others")
status = compare(complete) if complete else 0
for name in (run.name for run in missing):
    console.print_error(
        f"{name}: {queue.failures.get(name, 'stopped')}; its output: {out / name / 'train.log'}"
    )
if missing:
    fail(f"not complete: {len(missing)} of {len(part)} runs; to try them again, repeat the command")
raise SystemExit(status)
