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

import argparse
import random
import re
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import Run, Zygote, accepted, column, tiny_data

from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.plan import plan_of
from isogpt.training.degrees import check_degrees
from isogpt.training.settings import model_args_of

TOLERANCE = 1e-6  # of a loss
STEPS, SAVE_EVERY = 40, 4
SEQUENCES = 24  # of a step
VOCABULARY = 65
ARGS = ["--dataset=tiny", "--device=cpu", "--dtype=float32", "--optimizer=adamw", "--dropout=0.0"]
ARGS += ["--n_layer=4", "--n_head=4", "--n_embd=32", "--block_size=32", "--learning_rate=1e-3"]
ARGS += ["--warmup_iters=10", f"--max_iters={STEPS - 1}", "--lr_decay_iters=100", "--eval_interval=1000"]
ARGS += ["--eval_iters=2", f"--save_interval={SAVE_EVERY}", "--dist_timeout_s=60"]
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
ENDS = ("kill all", "kill one", "stop")


@dataclass(frozen=True)
class Layout:
    """A number of processes and the settings that divide the work."""

    world_size: int = 1
    settings: dict = field(default_factory=dict)

    def options(self) -> list[str]:
        """The options for train.py."""
        return [f"--{name}={value}" for name, value in self.settings.items()]

    def __str__(self) -> str:
        defaults = {"dp_replicate": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "activation_checkpointing": "none"}
        hidden = ("gradient_accumulation_steps", "pp_schedule" if self.settings["pp"] == 1 else "")
        shown = {k: v for k, v in self.settings.items() if k not in hidden and v != defaults.get(k)}
        return ", ".join([f"{self.world_size} proc.", *(f"{name} {value}" for name, value in shown.items())])


def draw_layout(rng: random.Random, model: str) -> Layout:
    """A random layout that train.py accepts for this model."""
    while True:
        drawn = {name: rng.choice(values) for name, values in CHOICES.items()}
        drawn["gradient_accumulation_steps"] = SEQUENCES // drawn["batch_size"]
        layout = Layout(rng.choice(WORLD_SIZES), drawn)
        if is_possible(layout, model):
            return layout


def is_possible(layout: Layout, model: str) -> bool:
    """Whether the layout passes the checks of settings that train.py does before it builds the model."""
    try:
        config = accepted("train.py", *ARGS, *MODELS[model], *layout.options())
        args = asdict(GPTConfig(**model_args_of(config, VOCABULARY)))
        check_degrees(plan_of(config, islands=1, world_size=layout.world_size, model_args=args))
    except ValueError:
        return False
    return True


def end_early(run: Run, end: str, step: int, rank: int) -> None:
    """Wait until the run has printed a step, then kill or stop the run. The run may have ended before."""
    run.until(lambda text: f"iter {step}:" in text, timeout=180)
    if end == "stop":
        run.kill([rank], signal.SIGTERM)
    else:
        run.kill([rank] if end == "kill one" else None)
    run.wait(timeout=180, ok=False)


def losses_of_one_process(zygote: Zygote, work: Path, model: str) -> dict[int, float]:
    """The losses of a process that is not interrupted."""
    options = [f"--batch_size={SEQUENCES // 4}", "--gradient_accumulation_steps=4"]
    zygote.start([*ARGS, *MODELS[model], *options, f"--out_dir={model}"], work).wait(timeout=600)
    return column(work / model, "loss")


def run_twice(
    zygote: Zygote, work: Path, out_dir: str, model: str, layouts: tuple[Layout, Layout], end: tuple
) -> str:
    """
    Train on the first layout until the end (how, step, rank), and resume on the second layout.

    Returns:
        The step from which the second run resumed; "0": there was no checkpoint.

    Raises:
        AssertionError: the second run failed.
    """
    first, second = layouts
    args = [*ARGS, *MODELS[model], f"--out_dir={out_dir}"]
    run = zygote.start([*args, *first.options()], work, first.world_size)
    end_early(run, *end)
    assert "iter " in run.text(), run.text()[-3000:]
    run = zygote.start([*args, *second.options(), "--init_from=auto"], work, second.world_size)
    resumed = re.search(r"step_0*(\d+)(?:/ckpt.pt)?, step", run.wait(timeout=300).text())
    return resumed[1] if resumed else "0"


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of two runs' losses; infinite if a step is missing."""
    if one.keys() != other.keys() or len(one) != STEPS:
        return float("inf")
    return max(abs(one[step] - other[step]) for step in one)


def measure(zygote: Zygote, work: Path, runs: int, seed: int) -> int:
    """Print a row for each run; returns how many runs failed or were over the tolerance."""
    rng, straight, bad = random.Random(seed), {}, 0
    print("| | model | layout | end | layout of the resume | resumed at | largest difference |")
    print("|---|---|---|---|---|---|---|", flush=True)
    names = list(MODELS)
    for number in range(runs):
        model = names[number % len(names)]
        layouts = draw_layout(rng, model), draw_layout(rng, model)
        step = rng.randrange(2 * SAVE_EVERY, STEPS // 2)  # after the first checkpoint
        end = rng.choice(ENDS), step, rng.randrange(layouts[0].world_size)
        if model not in straight:
            straight[model] = losses_of_one_process(zygote, work, model)
        try:
            resumed_at = run_twice(zygote, work, f"out{number}", model, layouts, end)
            difference = largest_difference(straight[model], column(work / f"out{number}", "loss"))
        except AssertionError as e:
            resumed_at, difference = "-", float("inf")
            print(e, file=sys.stderr)
        bad += int(difference > TOLERANCE)
        text = f"{difference:.1e}" + (" **over**" if difference > TOLERANCE else "")
        ended = f"{end[0]}, step {end[1]}"
        row = [number, model, layouts[0], ended, layouts[1], resumed_at, text]
        print("|", " | ".join(map(str, row)), "|", flush=True)
    return bad


def main() -> None:
    """Read the options, measure, and exit with status 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
