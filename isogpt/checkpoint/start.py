"""What a run starts from: a checkpoint to resume, weights from elsewhere, or initial weights."""

from dataclasses import dataclass

from torch import nn

from isogpt.checkpoint.download import discard_weights, fetch_weights
from isogpt.checkpoint.folder import look_for_start
from isogpt.checkpoint.huggingface import add_ids
from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.run_vocabulary import vocabulary_for_run
from isogpt.checkpoint.source import OpenCheckpoint, check_weights, open_checkpoint
from isogpt.checkpoint.state import TrainState, load_weights, restore_checkpoint
from isogpt.common import console
from isogpt.common.console import visible
from isogpt.data.dataset import Dataset
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import do_together, exit_together
from isogpt.options.values import is_url, without_credentials
from isogpt.parallel.parallelize import init_weights
from isogpt.training.optim import check_optimizers
from isogpt.training.settings import model_args_of, settings_of_model

# settings that change the updates of the weights. max_iters alone does not: it continues a run. A different
# optimizer cannot continue it, see state.restore_checkpoint
OF_UPDATES = (
    *("learning_rate", "weight_decay", "beta1", "beta2", "muon_lr", "embedding_lr"),
    *("muon_momentum", "grad_clip", "dropout", "residual_dtype"),
    *("decay_lr", "lr_schedule", "warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr"),
)

# settings of the model's shape that weights from elsewhere determine
SHAPE = ("arch", "n_layer", "n_head", "n_embd", "bias", "n_kv_head", "n_hidden", "vocab_size", "head")


@dataclass(frozen=True)
class Start:
    """What a run starts from. Without a checkpoint and a pretrained model: initial weights."""

    name: str  # init_from, without auto:
    is_resume: bool = False
    checkpoint: OpenCheckpoint | None = None
    pretrained: nn.Module | None = None  # a whole model, from weights of transformers

    @property
    def resumed(self) -> OpenCheckpoint | None:
        """The checkpoint whose run continues; None for a new run."""
        return self.checkpoint if self.is_resume else None

    @property
    def previous_dtype(self) -> str | None:
        """The dtype in which the resumed run has computed so far; None if it is not known (nanoGPT's)."""
        if not self.is_resume:
            return None
        return self.checkpoint.run["isogpt"].get("dtype")

    @property
    def description(self) -> str:
        """Where the weights are from, for the user."""
        if not self.checkpoint:
            return "scratch" if self.name == "auto" else self.name
        stored = self.checkpoint.stored
        place = self.name if is_url(self.name) else stored.path
        return f"{place}, step {stored.step}"

    def model_args(self, config: dict, vocab_size: int) -> dict:
        """The fields of GPTConfig of the model to start with, which settings describe if it is new."""
        if self.checkpoint:
            return self.checkpoint.run["model_args"]
        if self.pretrained:
            return self.pretrained.describe()
        return model_args_of(config, vocab_size)

    def vocabulary(self, config: dict, data: Dataset, vocab_size: int) -> tuple[Vocabulary, list[str]]:
        """
        Find the vocabulary that the run's checkpoints record, and what a user should know about settings and
        data that differ from the checkpoint's (all ranks). Exits if the data does not fit.
        """
        weights_from = config["out_dir"] if self.is_resume else self.name
        with exit_together():
            vocabulary, notes = vocabulary_for_run(
                data, self.checkpoint, weights_from, vocab_size, self.is_resume
            )
            args = self.model_args(config, data.vocab_size)
            changes = differences(config, args, self.checkpoint, self.is_resume, data.describe())
            return vocabulary, changes + notes

    def check(self, model: nn.Module) -> None:
        """Exit if a checkpoint's weights do not fit the model, which is not divided yet (all ranks)."""
        if self.checkpoint:
            do_together(check_weights, self.checkpoint, model)

    def load(self, state: TrainState, seed: int) -> None:
        """
        Fill the state: all of it on a resume, otherwise the model's weights (all ranks). Exits if a file
        cannot be read or does not fit, or an optimizer cannot be used, see optim.check_optimizers.

        Args:
            seed: determines initial weights.
        """
        do_together(check_optimizers, state.optimizers)
        if self.is_resume:
            do_together(state.load, self.checkpoint)
        elif self.checkpoint:
            do_together(restore_checkpoint, self.checkpoint, state.model, (), seed)
        elif self.pretrained:
            do_together(load_weights, state.model, self.pretrained.state_dict(), seed)
        else:
            do_together(init_weights, state.model, seed, has_done="has drawn its initial weights")
        if not self.is_resume:
            state.restart({})
        if self.checkpoint and is_url(self.name):  # all ranks have read what was downloaded
            do_together(discard_weights, self.checkpoint.stored)


def find_start(config: dict, ranks: Ranks, model_class: type[nn.Module]) -> Start:
    """
    Find and open what `init_from` asks for, after downloading what only the mirror contains (all ranks).
    Exits with a message if a checkpoint is needed and there is none, or if weights cannot be loaded.

    Args:
        model_class: GPT, from the model.py of the run.
    """
    init_from, out_dir = config["init_from"], config["out_dir"]
    launch, mirror = ranks.launch, config["mirror"]
    name = init_from.removeprefix("auto:")
    is_asked = init_from.partition(":")[0] == "resume"
    if mirror and launch.requeued and not is_asked and not is_run(out_dir):
        init_from = f"auto:{name}"  # Slurm has requeued the job, perhaps on a machine with an empty disk
    with exit_together():  # what these raise, they raise on all ranks
        stored, is_resume, reports = look_for_start(init_from, out_dir, launch, mirror)
    if not stored and is_url(name):
        stored, reports = fetch_weights(name, out_dir)
        name = without_credentials(name)
    if ranks.is_main:
        for report in reports:
            console.print_line(f"warning: {visible(report)}")
    if stored:
        return Start(name, is_resume, do_together(open_checkpoint, stored, model_class.config_class))
    if name in ("scratch", "auto"):
        return Start(name)
    pretrained = do_together(model_class.from_pretrained, name)
    if config["vocab_size"]:
        pretrained = do_together(add_ids, pretrained, config["vocab_size"])
    return Start(name, pretrained=pretrained)


def differences(
    config: dict,
    model_args: dict,
    source: OpenCheckpoint | None,
    is_resume: bool = False,
    data: dict[str, dict] | None = None,
) -> list[str]:
    """
    Describe settings that differ from the model's or the checkpoint's, a sentence for each.

    Args:
        model_args: the fields of GPTConfig of the model that the run starts with.
        source: the checkpoint that contains the model, if there is one.
        data: see Dataset.describe.
    """
    sentences = []
    model = settings_of_model(model_args, config)
    names = [name for name in SHAPE if name == "bias" or config[name] not in (0, "auto")]
    if model.get("n_expert"):
        names.append("n_expert_active")
    ignored = [name for name in names if model.get(name, config[name]) != config[name]]
    if ignored:
        origin = "the checkpoint" if source else config["init_from"].removeprefix("auto:")
        used = ", ".join(f"{name} {model[name]}" for name in ignored)
        typed = ", ".join(f"{name} {config[name]}" for name in ignored)
        verb = "is" if len(ignored) == 1 else "are"
        sentences.append(f"{used} of {origin} {verb} used, not {typed}")
    if is_resume:
        now = facts_of_curve(config, data or {})
        run = source.run
        was = now | facts_of_curve(config | run["config"], run["isogpt"])
        names = [name for name in now if now[name] != was[name]]
        changes = ", ".join(f"{name} {now[name]} (was {was[name]})" for name in names)
        if changes:
            sentences.append(f"this run continues with {changes}: the loss curve changes")
    return sentences


def facts_of_curve(config: dict, data: dict[str, dict]) -> dict:
    """
    What a run reads and how it updates the weights, as a user knows it.

    Args:
        data: what a checkpoint records of the data, see Dataset.describe.
    """
    sequences = config["gradient_accumulation_steps"] * config["batch_size"]
    facts = {"sequences per step": sequences, "dataset": visible(str(config["dataset"]))}
    mixture = []
    for name, source in data.get("sources", {}).items():
        name = visible(name)
        mixture.append(f"{name}:{source['of_1000']}")
        facts["dataset"] = ",".join(mixture)
        facts[f"tokens of {name}"] = source["digest"][:8]
    for name, digest in data.get("documents", {}).items():
        facts[f"documents of {visible(name)}"] = digest[:8]
    names = ("seed", "data_order", "block_size", *OF_UPDATES)
    return facts | {name: config[name] for name in names if name in config}
