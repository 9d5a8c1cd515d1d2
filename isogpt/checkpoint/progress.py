"""Progress of a run: the next step, the best loss, and what else continues after a resume."""

import math
import time
from dataclasses import asdict, dataclass, field

from isogpt.checkpoint.folder import excluded_steps
from isogpt.checkpoint.measures import NONE, best_step_of, changed_measures, measures_of, what_is_measured
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.data.dataset import Dataset
from isogpt.launch.together import broadcast, do_together
from isogpt.training.recent_steps import RecentSteps


@dataclass
class Totals:
    """
    What the logged steps of all launches add up to. Speeds are without the first steps of each launch, which
    are slow.
    """

    timed_s: float = 0.0  # of the steps that count for the speed
    timed_tokens: int = 0  # which these steps read
    timed_mfu: float = 0.0  # mfu * seconds of these steps; nan if one of them is unknown
    memory_gb: float = 0.0  # the most that a rank used

    def add(self, record: dict, is_timed: bool) -> None:
        """Add the record of a step."""
        self.memory_gb = max(self.memory_gb, record["memory_gb_max"])
        if is_timed:
            step_s, mfu = record["step_ms"] / 1e3, record["mfu"]
            self.timed_s += step_s
            self.timed_tokens += round(record["tokens_per_s"] * step_s)
            self.timed_mfu += step_s * (math.nan if mfu is None else mfu)


@dataclass
class Progress:
    """
    How far a run has come. `step` is the first step whose outcome is not known: the next one, or with
    `launched` one that a device may still compute. `excluded` are steps that are left out, see
    folder.exclude_steps.

    `best_val_loss` is the lowest loss of evaluations with these `measures`, see measures.what_is_measured.
    `best_step` is the step of the checkpoint with this loss; NONE: there is none.
    """

    tokens_per_step: int
    measures: dict = field(default_factory=dict)
    step: int = 0
    launched: int = 0  # steps from `step` on that are launched: 0 or 1, see StepPolicy
    tokens: int = 0  # of the steps before `step`, without skipped steps
    seconds_before: float | None = 0.0  # of training before `began`, see `seconds`
    began: float = field(default_factory=time.perf_counter)  # when this launch began to train
    totals: Totals = field(default_factory=Totals)
    position: int = 0  # tokens read by the steps before `step`, including skipped steps
    best_val_loss: float = math.inf
    best_step: int = NONE
    val_loss: float | None = None  # of the weights before `step`; None: not evaluated
    excluded: set[int] = field(default_factory=set)
    recent_steps: RecentSteps = field(default_factory=RecentSteps)  # from which spikes are detected
    wandb_id: str | None = None
    shares: tuple[float, ...] = ()  # the measured speeds of the data ranks, with shares=auto
    data: dict[str, dict] = field(default_factory=dict)  # see Dataset.describe

    def begin(self, config: dict, data: Dataset, source: OpenCheckpoint | None) -> list[str]:
        """
        Begin a run, or continue that of a checkpoint (all ranks); returns sentences about what is not
        continued.

        Args:
            data: its digest, together with settings in `config`, determines what validation losses measure.
            source: the checkpoint; None: the run is new.
        """
        self.measures = what_is_measured(config, data.digest, data.bytes_per_token)
        self.data = data.describe()
        if not source:
            return []
        run, ours = source.run, source.run["isogpt"]
        self.rewind(source)
        self.excluded = set(broadcast(do_together(excluded_steps, config["out_dir"])))
        self.wandb_id = ours.get("wandb_id")
        self.shares = tuple(ours.get("shares", ()))
        changed = changed_measures(measures_of(run), self.measures)
        if not changed:
            self.best_val_loss = run["best_val_loss"]
            self.best_step = best_step_of(run)
        elif math.isfinite(run["best_val_loss"]):
            best = f"the best val loss so far, {run['best_val_loss']:.4f}, does not count any more"
            return [f"{best}, since evaluations measure something different: {', '.join(changed)}"]
        return []

    def rewind(self, source: OpenCheckpoint) -> None:
        """Continue at a checkpoint's step."""
        run = source.run
        self.val_loss = source.stored.val_loss
        self.step = run["iter_num"]
        ours = run["isogpt"]
        self.tokens = ours.get("tokens", self.step * self.tokens_per_step)
        self.seconds_before, self.began = ours.get("seconds"), time.perf_counter()
        self.totals = Totals(**ours.get("totals", {}))
        self.position = ours.get("position", self.step * self.tokens_per_step)
        self.recent_steps = RecentSteps(**ours.get("recent_steps", {}))

    @property
    def seconds(self) -> float | None:
        """
        How long the run has trained in all launches, with evaluations and checkpoints, but without steps that
        were lost; None if a checkpoint did not say.
        """
        if self.seconds_before is None:
            return None
        return self.seconds_before + time.perf_counter() - self.began

    def is_unfinished(self, max_iters: int) -> bool:
        """Whether the last step or the evaluation after it is left to do."""
        return self.step <= max_iters or self.val_loss is None

    def evaluated(self, val_loss: float) -> None:
        """Note the validation loss of the weights before `step`."""
        self.val_loss = val_loss
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.best_step = val_loss, self.step

    def skip(self) -> None:
        """Leave out a step."""
        self.val_loss = None
        self.step += 1
        self.position += self.tokens_per_step

    def advance(self) -> None:
        """Count a step that was taken."""
        self.skip()
        self.tokens += self.tokens_per_step

    def describe(self) -> dict:
        """What a checkpoint stores of the progress besides iter_num and best_val_loss."""
        names = ("best_step", "measures", "tokens", "seconds", "position", "wandb_id")
        described = {name: getattr(self, name) for name in names} | self.data
        described |= {"shares": list(self.shares), "totals": asdict(self.totals)}
        return described | {"recent_steps": asdict(self.recent_steps)}
