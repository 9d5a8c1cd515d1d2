"""
Saving and restoring a run on any layout: what is in a checkpoint, and writing it in the background. Where checkpoints
are on disk, which of them are valid, and which are deleted: run_folder.py.
"""

import math
import operator
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from isogpt import optim, run_folder
from isogpt.agree import broadcast, do_together, exit_together, gather_objects, is_main, restarts_left, wait_together
from isogpt.architecture import GPTConfig
from isogpt.files import reason_of
from isogpt.hardware import synchronize
from isogpt.launch import Launch, Ranks, rank_names
from isogpt.mesh import AXES, Mesh
from isogpt.parallel import Exchange, Part, copy_to_cpu, keeps_errors, local, part_of, parts_by_name, reshard, splits_of
from isogpt.run_folder import Found
from isogpt.vocabulary import Vocabulary

MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # required in model_args
# parts of parameters' names: of torch.compile, DataParallel and DDP, FSDP, activation checkpointing, DeepSpeed
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
# Fields of forks in model_args, by parts of their names. HARMLESS ones concern speed, memory, training or what
# nanoGPT's model has anyway. CHANGING ones change what is computed, and the names and shapes of the weights do not show
# it; for all others, which the weights show, see check_weights.
HARMLESS = re.compile(r"flash|sdp|compile|checkpoint|fused|kernel|device|dtype|init|seed|batch|backend|drop|tie|tying")
CHANGING = re.compile(r"rope|rotary|alibi|pos|norm|eps|window|cap|act|glu|gelu|relu|scale|residual|parallel|attn")
NANOGPTS = ("none", "layernorm", "layer_norm", "gelu")  # values that say what nanoGPT's model computes
ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}
WPE = "transformer.wpe.weight"  # the only parameter whose shape may change on a resume: a shorter context


@dataclass
class Progress:
    """
    How far a run has come. `step` is the next step; `skipped` are steps excluded because they were not finite.

    `best_val_loss` is the lowest loss of those that `measures` the same, see run_folder.what_is_measured. `best_step`
    is the step of its checkpoint; NONE: there is none.
    """

    tokens_per_step: int
    measures: dict = field(default_factory=dict)
    step: int = 0
    tokens: int = 0
    position: int = 0  # tokens that the steps before `step` have read, those that were skipped included
    best_val_loss: float = math.inf
    best_step: int = run_folder.NONE
    skipped: set[int] = field(default_factory=set)
    wandb_id: str | None = None
    shares: tuple[float, ...] = ()  # the measured speeds of the data ranks, with shares=auto

    def load(self, source: "Source") -> list[str]:
        """Continue a checkpoint's run; returns a sentence about each thing that is not continued."""
        run, notes = source.run, []
        ours = run["isogpt"]
        self.rewind(run)
        self.skipped, self.wandb_id = set(ours.get("left_out", [])), ours.get("wandb_id")
        self.shares = tuple(ours.get("shares", ()))
        changed = run_folder.changed_measures(run_folder.measures_of(run), self.measures)
        if not changed:
            self.best_val_loss = run["best_val_loss"]
            self.best_step = run_folder.best_step_of(run)
        elif math.isfinite(run["best_val_loss"]):
            notes.append(f"the best val loss so far, {run['best_val_loss']:.4f}, does not count any more, since "
                         f"evaluations measure something different: {', '.join(changed)}")  # fmt: skip
        if source.optimizer == {}:
            notes.append(f"{source.found.path} contains no state of AdamW: the moments start at zero")
        if unused := source.unused_state:
            notes.append(f"{source.found.path} contains {', '.join(unused)} of an optimizer that is not used here: the "
                         "run continues with AdamW, whose steps are different")  # fmt: skip
        return notes

    def rewind(self, run: dict) -> None:
        """Go back to a checkpoint's step; the best loss and the skipped steps stay."""
        self.step = run["iter_num"]
        ours = run.get("isogpt", {})
        self.tokens = ours.get("tokens", self.step * self.tokens_per_step)
        self.position = ours.get("position", self.step * self.tokens_per_step)

    def skip(self) -> None:
        """A step is left out."""
        self.step += 1
        self.position += self.tokens_per_step

    def advance(self) -> None:
        """A step has been taken."""
        self.skip()
        self.tokens += self.tokens_per_step

    def describe(self) -> dict:
        """What a checkpoint stores of it besides iter_num and best_val_loss."""
        facts = {"best_step": self.best_step, "measures": self.measures}
        facts |= {"tokens": self.tokens, "position": self.position}
        return facts | {"left_out": sorted(self.skipped), "wandb_id": self.wandb_id, "shares": list(self.shares)}


@dataclass(frozen=True)
class Source:
    """
    An open checkpoint. `run` is everything that is not a tensor: model_args, iter_num, best_val_loss, config, isogpt.
    `weights` and `optimizer` are full tensors by parameter name, memory-mapped; None if they are in shards. `notes` are
    sentences about what is not used of a fork's checkpoint.
    """

    found: Found
    run: dict
    weights: dict[str, Tensor] | None = None
    optimizer: dict[str, dict[str, Tensor]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str | None:
        """The dtype that the run computed in; None in nanoGPT's checkpoints."""
        return self.run["isogpt"].get("dtype")

    @property
    def unused_state(self) -> list[str]:
        """What a fork's optimizer stored besides AdamW's moments, such as max_exp_avg_sq with amsgrad."""
        if self.run["isogpt"] or not self.optimizer:  # only this program writes isogpt
            return []
        return sorted({key for moments in self.optimizer.values() for key in moments} - ADAMW_STATE)


# ---------------------------------------------------------------------------------------------------------------------
# restoring


def find_start(init_from: str, out_dir: str, resume_step: int, ranks: Ranks) -> tuple[Source | None, bool]:
    """
    Find and open the checkpoint that `init_from` asks for (all ranks; rank 0 looks). Exits with a message if there is
    none but one is needed.

    Returns:
        (the checkpoint or None, whether the run resumes from it rather than starting with its weights)
    """
    found, is_resume, steps_seen = None, False, gather_objects(run_folder.steps_in(out_dir))
    look = partial(run_folder.find_start, init_from, out_dir, resume_step, ranks.launch)
    future = ThreadPoolExecutor(1).submit(look) if is_main() else None
    wait_together(future)  # verifying a large checkpoint can take longer than the collectives' timeout
    with exit_together():
        if future:
            found, is_resume, reports = future.result()
            for report in reports:
                print(f"warning: {report}", flush=True)
            if is_resume or init_from.split(":")[0] == "auto":
                check_views(out_dir, found.step if found else -1, steps_seen, rank_names(ranks.hosts))
    is_resume = broadcast(is_resume)
    found = run_folder.share(found, out_dir if is_resume else init_from.removeprefix("auto:"))
    if not found:
        return None, is_resume
    return do_together(partial(open_checkpoint, found)), is_resume  # may verify a copy, which takes long


def check_views(out_dir: str, step: int, steps_seen: list[list[int]], names: list[str]) -> None:
    """
    Check that no rank sees a newer checkpoint than the one that rank 0 has chosen, unless rank 0 sees it too.

    Args:
        step: the checkpoint's step; -1: rank 0 has found none.
        steps_seen: the steps of the checkpoints in each rank's out_dir.

    Raises:
        ValueError: a rank does; out_dir is not one folder.
    """
    newer = [[s for s in steps if s > step and s not in steps_seen[0]] for steps in steps_seen]
    found = [f"{name} sees step {', '.join(map(str, s))}" for name, s in zip(names, newer, strict=True) if s]
    if found:
        own = f"step {step} is the newest one" if step >= 0 else "there is none"
        raise ValueError(
            f"{'; '.join(found)} in out_dir {out_dir}, but on {names[0]} {own}: the ranks' out_dir is not the same "
            "folder. Set --out_dir= to a folder on a file system that all machines share, or copy the checkpoint "
            f"to the machine of {names[0]}"
        )


def open_checkpoint(found: Found) -> Source:
    """
    Read everything but the tensors.

    Raises:
        ValueError: the file does not have the form of a nanoGPT or isoGPT checkpoint, is not what rank 0 found, or is
            a damaged copy of it.
    """
    run_folder.check_same(found)
    if found.path.is_dir():
        return Source(found, found.manifest["run"])
    path, state = found.path, run_folder.read_file(found.path)
    if not isinstance(state["model"], dict) or not all(torch.is_tensor(w) for w in state["model"].values()):
        raise ValueError(f"{path}: its model is not a dict of tensors")
    weights = {without_wrappers(name): w for name, w in state["model"].items()}
    # nanoGPT without flash attention stores the causal mask of each block
    weights = {name: w for name, w in weights.items() if not name.endswith(".attn.bias")}
    run = {"isogpt": {}} | {k: v for k, v in state.items() if k not in ("model", "optimizer")}
    args, notes = nanogpt_args(path, state["model_args"])
    run["model_args"] = args | run["isogpt"].get("model_args", {"gelu": run["isogpt"].get("gelu", "none")})
    if "isogpt" not in state:  # a fork's settings may have the names of ours
        run["config"] = {k: v for k, v in state["config"].items() if v is not None and k != "optimizer"}
    return Source(found, run, weights, optim.by_name(weights, state.get("optimizer")), notes)


def without_wrappers(name: str) -> str:
    """A parameter's name without the names of modules that wrap others."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def nanogpt_args(path: Path, saved: object) -> tuple[dict, tuple[str, ...]]:
    """
    nanoGPT's fields of the model_args in a ckpt.pt.

    Returns:
        (the fields, sentences about fields of a fork that are not used)

    Raises:
        ValueError: a field is missing, or a fork's field changes the model.
    """
    args = {}
    for name in MODEL_ARGS:
        with suppress(TypeError, KeyError):  # numbers of numpy are accepted too
            args[name] = bool(saved[name]) if name == "bias" else operator.index(saved[name])
    absent = [name for name in MODEL_ARGS if name not in args]
    if absent:
        raise ValueError(f"{path}: its model_args have no {', '.join(absent)}")
    args["dropout"] = float(saved.get("dropout") or 0.0)
    default = GPTConfig(**args)
    others = {name: v for name, v in saved.items() if name not in args and v and v != getattr(default, name, None)}
    off = tuple(f"{name.removeprefix('use_')}_" for name, v in saved.items() if v is False)  # and what belongs to it
    others = {name: v for name, v in others.items() if not name.startswith(off) and str(v).lower() not in NANOGPTS}
    harmless = [name for name in others if HARMLESS.search(name.lower())]
    changing = [name for name in others if name not in harmless and CHANGING.search(name.lower())]
    if changing:
        found = some_of([f"{name}={others[name]!r}" for name in changing])
        raise ValueError(f"{path}: {found} in its model_args changes the model, which is not nanoGPT's: load it with "
                         f"the program that saved it")  # fmt: skip
    notes = []
    for name, value in others.items():
        reason = "it does not change the model"
        if name not in harmless:  # nanoGPT ignores it too
            reason = "its weights are those of nanoGPT's model, but if it changes what that computes, as rope=True " \
                     "would, losses and samples are wrong"  # fmt: skip
        notes.append(f"{name}={value!r} in model_args of {path} is not used: {reason}")
    return args, tuple(notes)


def check_weights(source: Source, model: nn.Module) -> None:
    """
    Check that a model, which is not divided yet, uses all weights of a ckpt.pt and lacks none, as nanoGPT does.

    Raises:
        ValueError: it does not.
    """
    if source.weights is None:  # in shards, which only this program writes
        return
    path, head, wte = source.found.path, "lm_head.weight", "transformer.wte.weight"
    used = {name for name, _ in model.named_parameters()}
    dense = {name.replace(".experts.", ".") for name in used if ".router." not in name}
    wanted = used if source.run["model_args"].get("n_expert") else dense  # an MLP is copied to experts
    lacking = sorted(wanted - source.weights.keys())
    if lacking:
        raise ValueError(f"{path} does not fit the model: it has no {some_of(lacking)}")
    if model.config.tied and head in source.weights and not same_values(source.weights[head], source.weights[wte]):
        raise ValueError(f"{path} does not fit the model: {head} and {wte} should be the same weights, but differ")
    unused = sorted(source.weights.keys() - wanted - ({head} if model.config.tied else set()))
    if unused:
        raise ValueError(f"{path} does not fit the model: it also contains {some_of(unused)}, which nanoGPT's model "
                         f"does not have")  # fmt: skip


def some_of(names: list[str]) -> str:
    """The first names of a list, and how many there are in addition."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal. Tied weights are one tensor in the file: then nothing is read."""
    is_same_kind = a.shape == b.shape and a.dtype == b.dtype
    return is_same_kind and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def not_finite(model: nn.Module) -> list[str]:
    """The names of the parameters of which this rank holds values that are not finite. Waits for the device once."""
    flags = {name: local(p).isfinite().all() for name, p in model.named_parameters()}
    is_finite = copy_to_cpu(torch.stack(list(flags.values())))
    synchronize(next(model.parameters()).device)
    return [name for name, ok in zip(flags, is_finite.tolist(), strict=True) if not ok]


def check_finite(model: nn.Module, where: object) -> None:
    """Raise ValueError if weights from `where` are not finite: nanoGPT saves them too."""
    if bad := not_finite(model):
        problem = f"weights in {where} are not finite ({some_of(bad)}), so that the model predicts nothing"
        raise ValueError(f"{problem}: use a checkpoint from before the loss became NaN")


def restore(source: Source, model: nn.Module, optimizers: list[torch.optim.Optimizer] | None = None,
            scaler: torch.amp.GradScaler | None = None, progress: Progress | None = None, seed: int = 0,
            island: tuple[int, int] = (0, 1)) -> None:  # fmt: skip
    """
    Copy a checkpoint into a model, and into its optimizers, scaler and progress if given, on any layout: each rank
    reads what it holds, and ranks do not communicate. Position embeddings are cut if the model has fewer of them, and
    MLPs are copied to the experts that the model has instead; `seed` is of the routers' weights then.

    Args:
        island: this rank's one and their number, each of which has optimizer state of its own.

    Raises:
        ValueError: they do not fit, or a file cannot be read or would run code.
    """
    reshard(model)
    saved_by = source.run["config"].get("optimizer", "adamw")
    if optimizers and saved_by != optim.kind_of(optimizers):
        advice = f"set --optimizer={saved_by}, or start a new run from its weights with --init_from=FOLDER"
        raise ValueError(f"{source.found.path} was saved with optimizer {saved_by!r}: {advice}")
    state = state_parts(model, optimizers, island) if optimizers else {}
    if source.weights is None:
        restore_shards(source, model, state, seed)
    else:
        try:
            load_weights(model, source.weights, seed)
        except (KeyError, RuntimeError) as e:
            raise ValueError(f"{source.found.path} does not fit the model: {reason_of(e)[:200]}") from e
        restore_moments(source, state)
    if progress:
        progress.rewind(source.run)
    if scaler and source.run["isogpt"].get("scaler"):
        scaler.load_state_dict(source.run["isogpt"]["scaler"])


def restore_moments(source: Source, state: dict[str, dict[str, Part]]) -> None:
    """Copy a ckpt.pt's optimizer state into the parts that this rank holds, see `restore`."""
    try:
        for name, saved in source.optimizer.items():
            for key, target in state.get(name, {}).items():
                whole = torch.as_tensor(saved[key], dtype=torch.float32)
                target = target.unstacked()  # the same on all islands
                target.put(adapt(whole, target, name))
    except (KeyError, RuntimeError) as e:
        problem = " ".join(str(e).split())[:200]
        raise ValueError(f"the optimizer's state in {source.found.path} does not fit the weights ({problem}), which "
                         "nanoGPT numbered differently before May 2023: start a new run from the weights, with "
                         "--init_from=FOLDER and a different --out_dir") from e  # fmt: skip


def load_weights(model: nn.Module, weights: dict[str, Tensor], seed: int = 0) -> None:
    """Copy full tensors by parameter name into a model on any layout, see `restore`."""
    targets = parts_by_name(model)
    if not any(".router." in name for name in weights):
        init_routers(model, targets, seed)
    for name, target in targets.items():
        dense_name = name.replace(".experts.", ".")
        target.put(adapt(weights[name if name in weights else dense_name], target, name))


def init_routers(model: nn.Module, targets: dict[str, Part], seed: int) -> None:
    """Initialize the routers of a model whose other weights come from a dense one; they are removed from `targets`."""
    for name in [name for name in targets if ".router." in name]:
        target = targets.pop(name)
        target.put(model.initial_weight(name, target.shape, seed))


def adapt(saved: Tensor, target: Part, name: str) -> Tensor:
    """The saved tensor in the target's shape: fewer position embeddings, or copies of an MLP for each expert."""
    if name == WPE and target.shape:
        return saved[: target.shape[0]]
    if ".experts." in name and target.shape:
        return saved.repeat(target.shape[0] // saved.shape[0], *(1,) * (saved.dim() - 1))
    return saved


def state_parts(model: nn.Module, optimizers: list[torch.optim.Optimizer],
                island: tuple[int, int] = (0, 1)) -> dict[str, dict[str, Part]]:  # fmt: skip
    """
    The parts of the optimizers' tensors that this rank holds, by parameter name (see optim.state_by_name). With several
    islands they are rows of a stack.
    """
    splits = {name: splits_of(p) for name, p in model.named_parameters()}
    return {name: {key: part_of(value, splits[name]).in_row(*island) for key, value in tensors.items()}
            for name, tensors in optim.state_by_name(model, optimizers).items()}  # fmt: skip


def restore_exchange(source: Source, exchange: Exchange, step: int) -> None:
    """
    Continue with a checkpoint's errors of compression and state of the islands, after `restore` (all ranks). What it
    lacks starts anew; on another number of ranks each one starts with the mean. Exits if a file cannot be read.
    """
    do_together(partial(read_exchange, source, exchange, step))
    exchange.resume()


def read_exchange(source: Source, exchange: Exchange, step: int) -> None:
    """The part of restore_exchange in which ranks do not communicate."""
    if source.weights is not None:  # a ckpt.pt has none of it
        exchange.restart(step)
        return
    from isogpt import shards

    exchange.restart(step, shards.shapes(source.found.path), source.run["isogpt"].get("averaged_at"))
    read_shards(source, {}, exchange.saved_parts(), is_optional=True)


def restore_shards(source: Source, model: nn.Module, state: dict[str, dict[str, Part]], seed: int) -> None:
    """`restore` for shards: torch.distributed.checkpoint reads the parts that overlap with this rank's."""
    args, weights = source.run["model_args"], parts_by_name(model)
    length, adapted = args["block_size"], []  # (name, this rank's part, a whole tensor of another shape to read into)
    state = {name: dict(parts) for name, parts in state.items()}
    moments = state.get(WPE, {})  # with zero 1 another rank may hold them
    for parts, key in ((weights, WPE), (moments, "exp_avg"), (moments, "exp_avg_sq")):
        if key in parts and parts[key].unstacked().shape[0] != length:
            target = parts[key].unstacked()
            adapted.append((WPE, target, torch.empty(length, *target.shape[1:])))
            parts[key] = part_of(adapted[-1][2])
    if model.config.n_expert and not args.get("n_expert"):
        init_routers(model, weights, seed)
        for name in [name for name in weights if ".experts." in name]:
            target = weights.pop(name)
            adapted.append((name, target, torch.empty(target.shape[0] // model.config.n_expert, *target.shape[1:])))
            weights[name.replace(".experts.", ".")] = part_of(adapted[-1][2])
    read_shards(source, weights, state)
    for name, target, whole in adapted:
        target.put(adapt(whole, target, name))


def read_shards(source: Source, *arguments: object, **options: object) -> None:
    """shards.read from a checkpoint. Raises ValueError if it cannot be loaded."""
    from isogpt import shards

    found = source.found
    try:
        shards.read(found.path, *arguments, manifest=None if found.is_verified else found.manifest, **options)
    except shards.ERRORS as e:  # damaged files raise nearly anything
        raise ValueError(f"{source.found.path} cannot be loaded: {reason_of(e)[:300]}") from e


# ---------------------------------------------------------------------------------------------------------------------
# saving


@dataclass
class Saver:
    """
    Writes one checkpoint at a time, in the background. Older ones are deleted only when a new one is complete.

    All ranks create it together. `owner` is what run_folder.enter_folder returned, known before the first checkpoint.
    """

    out_dir: str
    keep_last: int
    mesh: Mesh
    zero: int
    model_args: dict
    config: dict
    vocabulary: Vocabulary | None = None  # what the token ids mean
    exchange: Exchange | None = None  # known before the first checkpoint, like owner
    owner: str = ""
    launch: Launch | None = None  # known like owner
    pending: Future | None = None
    step: int = 0  # of the last checkpoint that was written or restored: the state of this step need not be saved
    began: float = 0.0  # when the last copy was started
    # of the last checkpoint that was written:
    folder: Path | None = None
    stall: float = 0.0  # how long it delayed its step
    seconds: float = 0.0  # how long it took
    problem: str = ""  # why it failed
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        # whether ranks hold different parts of the state
        self.world_size = self.mesh.size(*AXES)
        has_errors = keeps_errors(self.config.get("grad_compression", "none")) and self.world_size > 1
        self.is_sharded = self.zero > 0 or self.mesh.splits_model or self.mesh.islands > 1 or has_errors
        if self.is_sharded:  # shards are written from a thread, which needs a group of its own with a CPU backend
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.mesh.timeout_s))
            self.group = self.mesh.limit(group, timeout_s=7 * 24 * 3600)  # now that it is connected: disks may be slow

    def check_folder(self, hosts: tuple[str, ...]) -> None:
        """
        Check that every rank's out_dir is the folder that `owner`, which is known now, has claimed, and that every rank
        that writes checkpoints can write there (all ranks). Exits with a message if a checkpoint would be incomplete.

        If rank 0 writes everything, a folder of its own is good enough until a checkpoint is read.
        """
        if not self.owner or not self.config["save_checkpoint"]:
            return
        out = Path(self.out_dir).absolute()
        is_seen = run_folder.is_owned(out, self.owner, patience_s=min(5.0, self.mesh.timeout_s / 2))
        seen, names = gather_objects((is_seen, str(out))), rank_names(hosts)
        blind = [f"{names[r]} looks in {folder}" for r, (is_seen, folder) in enumerate(seen) if not is_seen]
        others = "; ".join(blind[:4]) + (f"; and {len(blind) - 4} more" if len(blind) > 4 else "")
        where = f"{names[0]} keeps this run in {seen[0][1]}, which is not what other ranks have as out_dir: {others}"
        advice = "set --out_dir= to one folder on a file system that all machines share"
        with exit_together():
            if blind and restarts_left():
                raise ValueError(f"{where}. torchrun restarts this run after a failure, and then all ranks read its "
                                 f"checkpoints, and any of them may be rank 0: {advice}, or type --max-restarts=0"
                                 )  # fmt: skip
            if blind and self.is_sharded:
                raise ValueError(f"{where}. All ranks write checkpoints, in shards, into one folder: {advice}, or "
                                 "--save_checkpoint=False")  # fmt: skip
        if blind and is_main():
            print(f"warning: {where}. Rank 0 writes the checkpoints, but all ranks read them on a resume or rollback: "
                  f"{advice}, or copy them before a resume", flush=True)  # fmt: skip
        if not self.is_sharded:
            return
        problems = gather_objects(run_folder.try_to_write(out, self.owner, self.mesh.rank))
        if is_main():
            shutil.rmtree(run_folder.unfinished_folder(out, self.owner, 0), ignore_errors=True)
        with exit_together():
            if problems[self.mesh.rank]:
                raise ValueError(problems[self.mesh.rank])

    def copy(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
        """
        Start to copy this rank's part of the state to the CPU; without shards, ranks other than 0 have none. It is
        complete after `check`, which waits for a GPU, and is what `start` writes.
        """
        self.began = time.perf_counter()
        if not self.is_sharded:
            return copied_state(model, optimizers) if is_main() else {}
        from isogpt import shards

        state, own = state_parts(model, optimizers, self.mesh.place("islands")), self.exchange.saved_parts()
        state = {name: state.get(name, {}) | own.get(name, {}) for name in state | own}
        return shards.copies(self.exchange.saved_weights(), state)

    def check(self, model: nn.Module, step: int) -> str:
        """
        Wait for the device, and raise ValueError if weights are not finite, or another run owns the folder: no
        checkpoint must be written. Returns a sentence if the folder was lost, else ''.
        """
        if bad := not_finite(model):
            raise ValueError(f"weights are not finite at step {step} ({some_of(bad)}): no checkpoint was written")
        if not is_main():
            return ""
        run_folder.check_owner(Path(self.out_dir), self.owner)
        return run_folder.claim_again(Path(self.out_dir), self.owner, self.launch)

    def start(self, copied: dict, progress: Progress, scaler: torch.amp.GradScaler, dtype: str,
              val_loss: float | None) -> None:  # fmt: skip
        """Start to write the state that `copy` returned (all ranks; without shards, others than 0 have none)."""
        # shards of this rank that rank 0 did not see when it discarded a checkpoint: in a folder that is not shared
        shutil.rmtree(run_folder.unfinished_folder(Path(self.out_dir), self.owner, self.step), ignore_errors=True)
        self.step, self.problem = progress.step, ""
        extra = {"dtype": dtype, "scaler": scaler.state_dict(), **progress.describe(), "world_size": self.world_size}
        extra["vocabulary"] = self.vocabulary.describe() if self.vocabulary else None
        run = {"model_args": self.model_args, "iter_num": progress.step, "best_val_loss": progress.best_val_loss}
        run |= {"config": self.config, "isogpt": extra}
        self.folder = run_folder.step_folder(Path(self.out_dir), self.step)
        unfinished = run_folder.unfinished_folder(Path(self.out_dir), self.owner, self.step)
        manifest = run_folder.make_manifest(run, self.world_size, self.zero, val_loss)
        if self.is_sharded:
            from isogpt import shards

            extra |= self.exchange.describe()
            manifest["run"] = run
            self.pending = shards.start_write(unfinished, copied, self.group)
            write = self.pending.result  # waits for all ranks' shards
        elif is_main():
            write = partial(write_file, unfinished / "ckpt.pt", in_nanogpts_form(run, copied))
        if is_main():
            background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self.pending = background.submit(self.finish, write, unfinished, manifest, self.began)
        self.stall = time.perf_counter() - self.began

    def finish(self, write: Callable[[], object], unfinished: Path, manifest: dict, began: float) -> None:
        """Write the files and commit the checkpoint (rank 0, in the background)."""
        try:
            write()
            if self.is_sharded:
                from isogpt import shards

                shards.check_complete(unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # makes room on a full disk
            raise
        run_folder.commit(unfinished, manifest, self.keep_last, self.owner)
        self.seconds = time.perf_counter() - began

    def poll(self) -> "Saver | None":
        """`wait` if the checkpoint under way has been completed or has failed, else None."""
        return self.wait() if self.pending and self.pending.done() else None

    def wait_together(self) -> "Saver | None":
        """`wait`, all ranks until the slowest one's part is written."""
        wait_together(self.pending)
        return self.wait()

    def wait(self) -> "Saver | None":
        """
        Wait for the checkpoint under way, on ranks other than 0 for their part of it. Returns None if there is none,
        else this Saver with the outcome: folder and seconds (rank 0), or problem.
        """
        if not self.pending:
            return None
        pending, self.pending = self.pending, None
        error = pending.exception()  # a full disk gives OSError, RuntimeError or DCP's own BaseException
        if error:
            self.problem = reason_of(error)[:300]
        return self

    def writes_alone(self) -> bool:
        """Whether this rank writes the checkpoint under way without the other ranks' help."""
        return self.pending is not None and not self.is_sharded


def nanogpt_state(run: dict, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """A copy of the state on the CPU in nanoGPT's form, which its train.py and sample.py load if it is a GPT-2."""
    copied = copied_state(model, optimizers)
    synchronize(next(model.parameters()).device)
    return in_nanogpts_form(run, copied)


def copied_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """Copies on the CPU of the weights and of the optimizer's state: complete when the device has been waited for."""
    weights = {name: copy_to_cpu(p.detach()) for name, p in model.named_parameters()}
    state = optim.saved_state(model, optimizers)
    state["state"] = {i: {k: copy_to_cpu(v) for k, v in old.items()} for i, old in state["state"].items()}
    if model.config.tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return {"model": weights, "optimizer": state}


def in_nanogpts_form(run: dict, copied: dict) -> dict:
    """What nanoGPT stores, from a run's description and `copied_state`."""
    args, others = {}, {}
    for name, value in run["model_args"].items():  # others: unknown to nanoGPT
        (args if name in (*MODEL_ARGS, "dropout") else others)[name] = value
    extra = run["isogpt"] | {"model_args": others}
    return {**copied, **run, "model_args": args, "isogpt": extra}


def write_file(path: Path, state: dict) -> None:
    """Write a ckpt.pt to the disk, in a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as f:
        try:
            torch.save(state, f)
        except RuntimeError as e:  # it hides an OSError, such as a full disk
            raise OSError(reason_of(e)) from e
        f.flush()
        os.fsync(f.fileno())
