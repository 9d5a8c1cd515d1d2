"""What a run computes: settings, data, the start and the layout, with nothing left open."""

from dataclasses import dataclass

from torch import nn

from isogpt.check.layout import prove_layout
from isogpt.checkpoint.folder import check_free
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.start import Start, find_start
from isogpt.data.dataset import Dataset, open_dataset
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.process_group import Ranks
from isogpt.launch.signals import Stop, watch_signals
from isogpt.launch.start_checks import check_start
from isogpt.launch.together import do_together
from isogpt.parallel import local_sgd
from isogpt.parallel.mesh import Mesh, connect_mesh
from isogpt.parallel.plan import Plan
from isogpt.speed.planner import make_plan
from isogpt.training import precision
from isogpt.training.budget import limits_of
from isogpt.training.schedule import Schedule, make_schedule
from isogpt.training.settings import settings_of_model, without_secrets


@dataclass
class Run:
    """
    What a run computes.

    Attributes:
        config: train.py's settings, with the number of steps that a budget of tokens amounts to.
        start: the checkpoint or the weights to start from. train.py deletes it, which frees their memory.
        plan: how a step is divided, and what it computes.
        stop: what all ranks agree on once per step, on a signal or with time_limit_s.
        vocabulary: what the token ids mean.
        code: digest of the code that trains.
        recorded: what checkpoints and logs record: the settings, and what the plan decided. No tokens and
            passwords, since checkpoints and logs are passed on.
        notes: what a user should know before the first step.
        checked: what the check of the layout has shown, for the user.
    """

    config: dict
    data: Dataset
    schedule: Schedule
    start: Start
    plan: Plan
    mesh: Mesh
    stop: Stop
    vocabulary: Vocabulary
    code: str
    recorded: dict
    notes: list[str]
    checked: list[str]

    @property
    def max_iters(self) -> int | float:
        """The last step."""
        return self.config["max_iters"]


def resolve_run(config: dict, ranks: Ranks, progress: Progress, model_class: type[nn.Module]) -> Run:
    """
    Decide what train.py's settings leave open, and compare a step of a small model on all ranks with the step
    of one process (all ranks). Exits with a message if ranks differ in settings, data or code, if a file
    cannot be read, or if settings, data, checkpoint and ranks do not fit each other.

    Args:
        progress: continues at the checkpoint's step, if the run is resumed.
        model_class: GPT, from the model.py of the run.
    """
    # do_together calls a function in a thread of each rank, and waits for all of them: disks may be slow
    names = ("dataset", "block_size", "vocab_size", "eval_datasets", "data_order")
    data = do_together(open_dataset, *(config[name] for name in names))
    limits = limits_of(config, len(data.train))
    config = config | limits.settings()
    schedule = make_schedule(config)
    code = check_start(ranks, config | data.facts())
    stop = watch_signals(config["time_limit_s"])
    if not config["eval_only"]:  # which writes nothing
        do_together(check_free, config["out_dir"], ranks.launch)
    start = find_start(config, ranks, model_class)
    plan = make_plan(config, ranks, data, start, model_class)
    mesh = connect_mesh(ranks.rank, plan, config["dist_timeout_s"])
    checked = []
    if config["check_layout"]:
        checked = prove_layout(model_class, plan, mesh, ranks.device, config)
    notes = precision.set_up(ranks.device, plan, config["deterministic"], start.previous_dtype)
    not_continued = progress.begin(config, data, start.resumed)
    vocabulary, differences = start.vocabulary(config, data, plan.model_args["vocab_size"])
    notes += [*data.notes, *not_continued, *differences, *limits.notes, *schedule.notes(config)]
    notes += local_sgd.notes(plan, config)
    recorded = config | plan.layout_settings() | settings_of_model(plan.model_args, config)
    recorded = without_secrets(recorded)
    return Run(config, data, schedule, start, plan, mesh, stop, vocabulary, code, recorded, notes, checked)
