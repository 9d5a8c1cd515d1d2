"""What a run starts from: a checkpoint to resume, weights from elsewhere, or initial weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from isogpt.checkpoint.download import discard_weights, fetch_newer, fetch_weights
from isogpt.checkpoint.folder import look_for_start
from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.owner import was_entered_by
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
from isogpt.training.settings import model_args_of, settings_of_model

DRAWN = "has drawn its initial weights"
# settings that change the updates of the weights. max_iters alone does not: it continues a run. A different
# optimizer cannot continue it, see state.restore_checkpoint
OF_UPDATES = (
    *("learning_rate", "weight_decay", "beta1", "beta2", "muon_lr", "embedding_lr"),
    *("muon_momentum", "grad_clip", "dropout", "residual_dtype"),
    *("decay_lr", "lr_schedule", "warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr"),
)


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
        """The dtype in which the resumed run has computed so far; None if it is not known."""
        return self.resumed.dtype if self.resumed else None

    @property
    def description(self) -> str:
        """Where the weights are from, for the user."""
        if not self.checkpoint:
            return "scratch" if self.name == "auto" else self.name
        if is_url(self.name):
            return f"{self.name}, step {self.checkpoint.stored.step}"
        return f"{self.checkpoint.stored.path}, step {self.checkpoint.stored.step}"

    def model_args(self, config: dict, vocab_size: int) -> dict:
        """The fields of GPTConfig of the model to start with, which settings describe if it is new."""
        if self.checkpoint:
            return self.checkpoint.run["model_args"]
        return self.pretrained.describe() if self.pretrained else model_args_of(config, vocab_size)

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
        cannot be read or does not fit.

        Args:
            seed: determines initial weights.
        """
        if self.is_resume:
            do_together(state.load, self.checkpoint)
        elif self.checkpoint:
            do_together(restore_checkpoint, self.checkpoint, state.model, (), seed)
        elif self.pretrained:
            do_together(load_weights, state.model, self.pretrained.state_dict(), seed)
        else:
            do_together(init_weights, state.model, seed, has_done=DRAWN)
        if self.checkpoint or self.pretrained:
            do_together(state.check_finite, self.checkpoint.stored.path if self.checkpoint else self.name)
        if not self.is_resume:
            state.slow_network.restart(state.step)
        if self.checkpoint and is_url(self.name):  # all ranks have read what was downloaded
            discard_weights(self.checkpoint.stored)


def find_start(config: dict, ranks: Ranks, from_pretrained: Callable[[str], nn.Module]) -> Start:
    """
    Find and open what `init_from` asks for, after downloading what only the mirror contains (all ranks).
    Exits with a message if a checkpoint is needed and there is none, or if weights cannot be loaded.

    Args:
        from_pretrained: loads a model with weights of transformers, by name.
    """
    init_from, out_dir, launch = config["init_from"], config["out_dir"], ranks.launch
    name = init_from.removeprefix("auto:")
    if config["mirror"] and launch.requeued and not is_run(out_dir) and init_from != "resume":
        # Slurm has requeued the job, perhaps on a machine with an empty disk
        init_from = "auto" if init_from == "auto" else f"auto:{name}"
    with exit_together():  # what these raise, they raise on all ranks
        reports = fetch_newer(config | {"init_from": init_from}, launch)
        stored, is_resume, more = look_for_start(init_from, out_dir, config["resume_step"], launch)
    if not stored and is_url(name):
        stored, name = fetch_weights(name, out_dir), without_credentials(name)
    if ranks.is_main:
        for report in reports + more:
            console.print_line(f"warning: {console.visible(report)}")
        if is_resume and was_entered_by(Path(out_dir), launch):
            text = f"restart: continues what this launch has written to {out_dir}, step {stored.step}"
            console.print_line(text)
    if stored:
        return Start(name, is_resume, do_together(open_checkpoint, stored))
    if name in ("scratch", "auto"):
        return Start(name)
    return Start(name, pretrained=do_together(from_pretrained, name))


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
    model, sentences = settings_of_model(model_args, config), []
    names = ("arch", "n_layer", "n_head", "n_embd", "bias", "n_kv_head", "n_hidden", "vocab_size", "head")
    chosen = [name for name in names if name == "bias" or config[name] not in (0, "auto")]
    if model.get("n_expert"):
        chosen.append("n_expert_active")
    ignored = [name for name in chosen if config[name] != model.get(name, config[name])]
    origin = "the checkpoint" if source else config["init_from"].removeprefix("auto:")
    if ignored:
        used, unused = (", ".join(f"{name} {values[name]}" for name in ignored) for values in (model, config))
        sentences.append(f"{used} of {origin} {'is' if len(ignored) == 1 else 'are'} used, not {unused}")
    if config["n_expert"] and not model.get("n_expert"):
        sentences.append(
            f"{origin} contains no experts: each of the {config['n_expert']} starts as a copy of the MLP"
        )
    return sentences + (changes_of_curve(config, source.run, data or {}) if is_resume else [])


def changes_of_curve(config: dict, run: dict, data: dict[str, dict]) -> list[str]:
    """
    Describe in one sentence how a resumed run differs from the earlier run, whose checkpoint contains `run`,
    in what it reads or in how it updates the weights. For `data`, see `differences`.
    """
    before, recorded, pairs = run["config"], run.get("isogpt", {}), []
    was, now = (c["gradient_accumulation_steps"] * c["batch_size"] for c in (config | before, config))
    if was != now:
        pairs.append(f"sequences per step {now} (was {was})")
    sources, sources_before = data.get("sources", {}), recorded.get("sources", {})
    names = ["seed", "data_order", *OF_UPDATES]
    if sources != sources_before:
        now, was = spelled(sources, config), spelled(sources_before, before)
        pairs.append(f"other tokens in dataset {now}" if now == was else f"dataset {now} (was {was})")
    elif not sources:
        names.insert(0, "dataset")
    if {config["data_order"], before.get("data_order")} & {"shuffle", "documents"}:  # windows are cut anew
        names.append("block_size")
    changed = [name for name in names if name in before and before[name] != config[name]]
    pairs += [f"{name} {config[name]} (was {before[name]})" for name in changed]
    documents, documents_before = data.get("documents", {}), recorded.get("documents", {})
    other = [name for name in documents if documents[name] != documents_before.get(name, documents[name])]
    if other and "block_size" not in changed:
        pairs.append(f"windows that begin with other documents of {', '.join(map(visible, other))}")
    return [f"this run continues with {', '.join(pairs)}: the loss curve changes"] if pairs else []


def spelled(sources: dict[str, dict], config: dict) -> str:
    """The sources of a mixture as --dataset contains them, or the name of a single data set."""
    parts = [f"{visible(name)}:{source['of_1000']}" for name, source in sources.items()]
    return ",".join(parts) or visible(str(config.get("dataset")))
