"""
Draw random layouts, kill or stop the runs, resume them on different random layouts, and compare every loss.

    python measure/random_layouts.py                 24 runs, seed 0
    python measure/random_layouts.py --runs=100 --seed=1

A run trains 40 steps of a tiny model in float32, with AdamW at 1e-3 and 10 steps of warm-up. A random layout
trains until a random step, where the run is killed (all ranks or one) or stopped (SIGTERM to one rank). A
different random layout resumes the run. Layouts differ in the number of processes, in all degrees, and in the
size of the micro-batches. The loss of each step must equal the loss of one process within 1e-6. The exit
status is 1 if a difference is larger, or if a run fails.
"""

import math
import random
import re
import signal
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import Zygote, accepted, column, tiny_data

from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.plan import plan_of
from isogpt.training.settings import check_plan, model_args_of

TOLERANCE = 1e-6  # of a loss
STEPS, SAVE_EVERY = 40, 4
SEQUENCES = 24  # of a step
VOCABULARY = 65
ARGS = "--dataset=tiny --device=cpu --dtype=float32 --optimizer=adamw --dropout=0.0 --n_layer=4 --n_head=4"
ARGS += " --n_embd=32 --block_size=32 --learning_rate=1e-3 --warmup_iters=10 --lr_decay_iters=100"
ARGS += f" --max_iters={STEPS - 1} --eval_interval=1000 --eval_iters=2 --save_interval={SAVE_EVERY}"
ARGS = [*ARGS.split(), "--dist_timeout_s=60"]
MODELS = {
    "gpt2": ["--bias=True"],
    "nanochat": ["--arch=nanochat"],
    "llama": ["--arch=llama", "--n_kv_head=2"],
    "experts": ["--arch=llama", "--n_expert=4"],
}
WORLD_SIZES = (1, 2, 2, 3, 3, 4, 4, 4, 5, 6)
# values from which a layout is drawn; a value that is listed twice is drawn twice as often
CHOICES = {
    "zero": (0, 1, 2, 3),
    "dp_replicate": (1, 1, 2),
    "tp": (1, 1, 2, 4),
    "pp": (1, 1, 2, 3, 4),
    "pp_schedule": ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"),
    "cp": (1, 1, 2, 4),
    "ep": (1, 2, 4),
    "activation_checkpointing": ("none", "full", "selective", "every:2"),
    "batch_size": tuple(n for n in range(1, SEQUENCES + 1) if SEQUENCES % n == 0),
}
DEFAULTS = ("--zero=0", "--dp_replicate=1", "--tp=1", "--pp=1", "--cp=1", "--ep=1")
DEFAULTS += ("--activation_checkpointing=none",)
ENDS = ("kill all", "kill one", "stop")


@dataclass(frozen=True)
class Layout:
    """A number of processes and the settings that divide the work."""

    processes: int
    options: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([f"{self.processes} proc.", *(o for o in self.options if o not in DEFAULTS)])


def draw_layout(rng: random.Random, model: str) -> Layout:
    """A random layout that train.py accepts for this model."""
    while True:
        drawn = {name: rng.choice(values) for name, values in CHOICES.items()}
        drawn["gradient_accumulation_steps"] = SEQUENCES // drawn["batch_size"]
        options = tuple(f"--{name}={value}" for name, value in drawn.items())
        layout = Layout(rng.choice(WORLD_SIZES), options)
        if is_possible(layout, model):
            return layout


def is_possible(layout: Layout, model: str) -> bool:
    """Whether the layout passes the checks of settings that train.py does before it builds the model."""
    try:
        config = accepted("train.py", *ARGS, *MODELS[model], *layout.options)
        args = asdict(GPTConfig(**model_args_of(config, VOCABULARY)))
        check_plan(plan_of(config, islands=1, world_size=layout.processes, model_args=args))
    except ValueError:
        return False
    return True


def run_twice(zygote: Zygote, out: Path, model: str, layouts: list[Layout], rng: random.Random) -> list:
    """
    Train on the first layout, kill or stop the run, and resume on the second layout; returns how and at which
    step the first run ended, and from which step the second one resumed ("0": there was no checkpoint).

    Raises:
        AssertionError: a run failed.
    """
    args = [*ARGS, *MODELS[model], f"--out_dir={out}"]
    end, step = rng.choice(ENDS), rng.randrange(2 * SAVE_EVERY, STEPS // 2)  # after the first checkpoint
    rank = rng.randrange(layouts[0].processes)
    run = zygote.start([*args, *layouts[0].options], out.parent, layouts[0].processes)
    assert run.until(lambda text: f"iter {step}:" in text, timeout=180), run.text()[-3000:]
    run.kill(None if end == "kill all" else [rank], signal.SIGTERM if end == "stop" else signal.SIGKILL)
    run.wait(timeout=180, ok=False)
    args += [*layouts[1].options, "--init_from=auto"]
    run = zygote.start(args, out.parent, layouts[1].processes).wait(timeout=300)
    resumed = re.search(r"step_0*(\d+)(?:/ckpt.pt)?, step", run.text())
    return [end, step, resumed[1] if resumed else "0"]


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of two runs' losses; infinite if a step is missing."""
    if one.keys() != other.keys() or len(one) != STEPS:
        return math.inf
    return max(abs(one[step] - other[step]) for step in one)


def measure(zygote: Zygote, work: Path, runs: int, seed: int) -> int:
    """Print a row for each run; returns how many runs failed or were over the tolerance."""
    rng, straight, bad = random.Random(seed), {}, 0
    print("| | model | layout | end | at step | layout of the resume | resumed at | largest difference |")
    print("|---|---|---|---|---|---|---|---|")
    for number in range(runs):
        model, out = [*MODELS][number % len(MODELS)], work / f"out{number}"
        layouts = [draw_layout(rng, model) for _ in range(2)]
        if model not in straight:
            options = [f"--batch_size={SEQUENCES // 4}", "--gradient_accumulation_steps=4"]
            args = [*ARGS, *MODELS[model], *options, f"--out_dir={work / model}"]
            zygote.start(args, work).wait(timeout=600)
            straight[model] = column(work / model, "loss")
        try:
            end, step, resumed_at = run_twice(zygote, out, model, layouts, rng)
            difference = largest_difference(straight[model], column(out, "loss"))
        except AssertionError as e:
            end = step = resumed_at = "-"
            difference = math.inf
            print(e, file=sys.stderr)
        bad += difference > TOLERANCE
        text = f"{difference:.1e}" + (" **over**" if difference > TOLERANCE else "")
        row = [number, model, layouts[0], end, step, layouts[1], resumed_at, text]
        print("|", " | ".join(map(str, row)), "|", flush=True)
    return bad


def main() -> None:
    """Read the options, measure, and exit with status 1 if a run failed."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    zygote = Zygote()
    with tempfile.TemporaryDirectory() as folder:
        tiny_data(folder)
        bad = measure(zygote, Path(folder), options.runs, options.seed)
    zygote.close()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
