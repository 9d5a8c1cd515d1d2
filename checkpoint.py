"""
Saving and loading a run: whole or absent, verified, newest good one first, on any layout; and nanoGPT's ckpt.pt.

    <out_dir>/step_00001200/ckpt.pt              the state in nanoGPT's form, where one process holds it (zero 0)
    <out_dir>/step_00001200/*.distcp, .metadata  or in shards, each rank's part, by the names of an unsharded model
    <out_dir>/step_00001200/manifest.json        what it is and a checksum of each file, written last
    <out_dir>/ckpt.pt, ckpt_best.pt              links to the newest and the best ckpt.pt

A save is written in the background, in a folder of another name, and renamed into place when all of it is on the disk:
what is called step_* is whole. The checksums are there for what happens to it afterwards.

    python checkpoint.py OUT_DIR --list          what is there: step, form, loss, size, whether it is whole
    python checkpoint.py OUT_DIR --to=ckpt.pt    turn the newest save into one file of nanoGPT's form, OUT_DIR/ckpt.pt
    python checkpoint.py OUT_DIR --to=shards     or into shards; neither needs the devices that it was trained on
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sys
import uuid
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from model import GPT, GPTConfig
from parallel import materialize, moments_by_name, parameters_by_name, put

STEP = re.compile(r"step_(\d{8,})")
ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # what model_args must have
WPE = "transformer.wpe.weight"  # the one parameter whose shape may change on a resume: a shorter context


@dataclass(frozen=True)
class Save:
    """One save on disk: its ckpt.pt, or its folder of shards; its step; its manifest (empty for a bare ckpt.pt)."""

    path: Path
    step: int
    manifest: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """
    A save that was opened. `run` is all that is no tensor: model_args, iter_num, best_val_loss, config, isogpt.
    `weights` and `moments` are whole tensors by parameter name, mapped from the file; None where they are in shards.
    """

    save: Save
    run: dict
    weights: dict[str, Tensor] | None = None
    moments: dict[str, dict[str, Tensor]] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# saving


class HashedFile:
    """A file to write to that knows the SHA-256 of what it was given: a save is not read again to be summed."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def check_finite(model: torch.nn.Module, step: int) -> None:
    """Raise ValueError where a weight that this rank holds is not finite: such a model is not saved over a good one."""
    bad = [name for name, p in parameters_by_name(model).items() if not local(p).isfinite().all()]
    if bad:
        raise ValueError(f"weights are not finite at step {step} ({bad[0]} and {len(bad) - 1} more): not saved")


def local(value: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return value.to_local() if hasattr(value, "to_local") else value


def start_save(
    out_dir: str,
    run: dict,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: dict,
    keep_last: int,
    owner: str,
    group: dist.ProcessGroup | None = None,
    done: Callable[[Path], None] = lambda folder: None,
) -> Future:
    """
    Begin to save (all ranks). Returns when the state has been copied; the rest goes on in the background.

    Earlier saves go only when this one is whole: the last `keep_last`, the best one, and any of another block_size
    (from before the context was shortened) stay.

    Args:
        run: everything but tensors, see Source.
        owner: what take_over gave this run: when another one has taken over since, the save does not count.
        facts: for the manifest: best_step, val_loss, layout (with `zero`: 0 saves one ckpt.pt, else shards).
        group: for shards: a process group of its own with a CPU backend, since it is used from a thread.
        done: called on rank 0 when the save is whole, with its folder.

    Returns:
        A future: see `finish_save`. One save at a time.
    """
    step, first = run["iter_num"], not dist.is_initialized() or dist.get_rank() == 0
    unfinished = Path(out_dir) / f"unfinished_{owner[:8]}_step_{step:08d}"
    manifest = {"step": step, **facts, "block_size": run["model_args"]["block_size"], "torch": torch.__version__}
    finish = lambda files: done(commit(unfinished, manifest | {"files": files}, keep_last, owner))  # noqa: E731
    background = ThreadPoolExecutor(1, thread_name_prefix="save")
    if facts["layout"]["zero"] == 0:
        if not first:  # the other ranks have the same weights: nothing to do
            future = Future()
            future.set_result(None)
            return future
        state = nanogpt_state(run, model, optimizer)
        return background.submit(lambda: finish(write_ckpt(unfinished, state)))
    if first:
        unfinished.mkdir(parents=True, exist_ok=True)
    manifest["run"] = run
    import shards

    parts = shards.start_write(unfinished, parameters_by_name(model), moments_by_name(model, optimizer), group)
    if not first:
        return parts

    def finish_shards() -> None:
        try:
            parts.result()  # all ranks have written
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        finish(hash_files(unfinished))

    return background.submit(finish_shards)


def finish_save(saving: Future) -> str:
    """Wait for a save to be whole (on the other ranks: for their part); '' or what went wrong. Nothing else is lost."""
    try:
        saving.result()
        return ""
    except BaseException as e:  # a full disk comes as OSError, RuntimeError or DCP's own BaseException
        if isinstance(e, KeyboardInterrupt | SystemExit):
            raise
        return " ".join(str(e).split())[-300:] or type(e).__name__


def nanogpt_state(run: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """A copy, on the CPU, of the state in nanoGPT's form: what its train.py and sample.py load."""
    copy = lambda t: t.detach().to("cpu", copy=True)  # noqa: E731
    weights = {name: copy(p) for name, p in parameters_by_name(model).items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    moments_by_name(model, optimizer)  # makes those that are not there yet
    state = optimizer.state_dict()
    state["state"] = {i: {k: copy(v) for k, v in moments.items()} for i, moments in state["state"].items()}
    # nanoGPT's model_args have no place for the kind of GELU
    args = {k: v for k, v in run["model_args"].items() if k != "gelu"}
    extra = {**run["isogpt"], "gelu": run["model_args"].get("gelu", "none")}
    return {"model": weights, "optimizer": state, **run, "model_args": args, "isogpt": extra}


def write_ckpt(folder: Path, state: dict) -> dict:
    """Write folder/ckpt.pt and see it to the disk; returns its line of the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with open(folder / "ckpt.pt", "wb") as f:
            hashed = HashedFile(f)
            torch.save(state, hashed)
            f.flush()
            os.fsync(f.fileno())
            return {"ckpt.pt": {"bytes": f.tell(), "sha256": hashed.hash.hexdigest()}}
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # a full disk has room again
        raise


def hash_files(folder: Path) -> dict:
    """The manifest's lines of all files in a folder, which are on the disk already."""
    files = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as f:
            files[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
    return files


def take_over(out_dir: str) -> str:
    """
    Make this run the owner of its folder (rank 0); returns the name that it owns it by. What an earlier run that is
    still there, an orphan or one that was started twice, writes after this does not count.
    """
    owner = uuid.uuid4().hex
    write_whole(Path(out_dir) / "owner", owner)
    return owner


def check_owner(out: Path, owner: str) -> None:
    """Raise ValueError where another run has taken over."""
    try:
        now = (out / "owner").read_text()
    except FileNotFoundError:  # somebody tidied up
        now = owner
    if now != owner:
        raise ValueError(f"another run has been started in {out}: this one stops here, and what it saved stays")


def commit(unfinished: Path, manifest: dict, keep_last: int, owner: str = "") -> Path:
    """Make a save that is written count (rank 0): manifest, rename, links; then delete what need not be kept."""
    out = unfinished.parent
    folder = out / f"step_{manifest['step']:08d}"
    try:
        write_whole(unfinished / "manifest.json", sealed(manifest))
        if owner:
            check_owner(out, owner)
        if folder.exists() and not damage(folder):
            shutil.rmtree(unfinished)  # the same step is the same state: what is there and whole stays
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(unfinished, folder)
        sync_folder(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    link_newest(out, folder, manifest["best_step"])
    prune(out, folder, manifest["best_step"], keep_last, manifest["block_size"])
    return folder


def make_folder(out_dir: str) -> None:
    """Make the run's folder. Raises ValueError where nothing can be written there."""
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        (Path(out_dir) / "unfinished_trial").mkdir(exist_ok=True)
        (Path(out_dir) / "unfinished_trial").rmdir()
    except OSError as e:
        raise ValueError(f"out_dir {out_dir} cannot be written to ({e.strerror}): set another --out_dir=") from e


def clean_up(out_dir: str) -> None:
    """Delete what a killed run left of a save or of a deletion (rank 0, before the first save)."""
    for path in Path(out_dir).glob("unfinished_*"):
        shutil.rmtree(path, ignore_errors=True)


def sealed(manifest: dict) -> str:
    """The text of manifest.json, whose last entry is a checksum of all the others."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "manifest_sha256": digest}, indent=1)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either as it was or all there, on the disk."""
    other = path.with_name(path.name + ".tmp")
    with open(other, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(other, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in this folder last through a power failure."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def link_newest(out: Path, folder: Path, best_step: int) -> None:
    """Point ckpt.pt at the newest save and ckpt_best.pt at the best one, where they are in that form."""
    for link, target in ((out / "ckpt.pt", folder), (out / "ckpt_best.pt", out / f"step_{best_step:08d}")):
        if (target / "ckpt.pt").exists():
            point(link, target / "ckpt.pt")


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, or a copy where the file system has none; never half of it."""
    other = link.with_name(link.name + ".tmp")
    other.unlink(missing_ok=True)
    try:
        os.symlink(target.relative_to(link.parent), other)
    except OSError:
        shutil.copyfile(target, other)
    os.replace(other, link)


def prune(out: Path, newest: Path, best_step: int, keep_last: int, block_size: int) -> None:
    """Delete what `save` need not keep."""
    folders = [f for f in step_folders(out) if int(STEP.fullmatch(f.name)[1]) <= int(STEP.fullmatch(newest.name)[1])]
    for folder in folders[keep_last:]:
        manifest = read_manifest(folder)
        if folder.name != f"step_{best_step:08d}" and manifest.get("block_size", block_size) == block_size:
            gone = folder.with_name("unfinished_" + folder.name)  # a half-deleted save must not look like one
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
    for link in (out / "ckpt.pt", out / "ckpt_best.pt"):
        if link.is_symlink() and not link.exists():  # it led to a save that is gone; the newer ones are in shards
            link.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# finding


def step_folders(out: Path) -> list[Path]:
    """The step folders, newest first."""
    return sorted((f for f in out.glob("step_*") if STEP.fullmatch(f.name)), key=lambda f: -int(f.name[5:]))


def read_manifest(folder: Path) -> dict:
    """A save's manifest; empty where it is missing or not what was written."""
    try:
        text = (folder / "manifest.json").read_text()
        manifest = {k: v for k, v in json.loads(text).items() if k != "manifest_sha256"}
    except (OSError, ValueError, AttributeError):
        return {}
    return manifest if text == sealed(manifest) else {}


def damage(folder: Path) -> str:
    """What is wrong with a save: '' if each file is, byte for byte, what was written."""
    manifest = read_manifest(folder)
    if not manifest or folder.name != f"step_{manifest['step']:08d}":
        return "its manifest.json is missing or damaged"
    for name, expected in manifest["files"].items():
        try:
            with open(folder / name, "rb") as f:
                actual = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            return f"{name} cannot be read ({e.strerror})"
        if actual != expected["sha256"]:
            return f"{name} is not what was written (its checksum differs)"
    return ""


def open_folder(folder: Path) -> Save:
    """The save in a step folder that verified."""
    manifest = read_manifest(folder)
    return Save(folder / "ckpt.pt" if "ckpt.pt" in manifest["files"] else folder, manifest["step"], manifest)


def best(out_dir: str) -> tuple[Save | None, list[str]]:
    """The save with the best val loss where it is whole, else the newest; as `newest` returns it."""
    found, reports = newest(out_dir)
    alone = Path(out_dir) / "ckpt_best.pt"
    if not found and alone.exists() and not damaged_zip(alone):  # copied here without its folder
        return Save(alone, load(alone)["iter_num"]), reports
    folder = Path(out_dir) / f"step_{found.manifest.get('best_step', -1) if found else -1:08d}"
    if folder.exists() and not damage(folder):
        return open_folder(folder), reports
    return found, reports


def newest(out_dir: str) -> tuple[Save | None, list[str]]:
    """
    The save to resume from: the newest that verifies, be it a step folder or a bare ckpt.pt that nanoGPT left.

    Returns:
        (the save or None, a sentence for each that was passed over because it is damaged)
    """
    out, reports, found = Path(out_dir), [], None
    for folder in step_folders(out):
        problem = damage(folder)
        if not problem:
            found = open_folder(folder)
            break
        reports.append(f"{folder} is damaged: {problem}")
    bare = out / "ckpt.pt"
    if not bare.exists():
        return found, reports
    # ckpt.pt is our link to a save that was looked at above. But a file of its own, or one that nanoGPT wrote through
    # our link, is newer than all we saved, since each save of ours puts the link there; and a copy of ours counts
    # where it is further on than what verified.
    linked = STEP.fullmatch(bare.resolve().parent.name)
    if linked and found and int(linked[1]) <= found.step and not any(bare.resolve().parent.name in r for r in reports):
        return found, reports
    problem = damaged_zip(bare)
    try:
        state = {} if problem else load(bare)
    except ValueError as e:
        problem, state = str(e), {}
    if state and ("isogpt" not in state or (not linked and state["iter_num"] > (found.step if found else -1))):
        return Save(bare, state["iter_num"]), reports
    if problem and not linked:
        reports.append(f"{bare} is damaged: {problem}")
    return found, reports


def adopt(out_dir: str, found: Save) -> None:
    """
    Before a run goes on in out_dir with `found` (rank 0): name what is damaged so, since it must not count as kept;
    and make a bare ckpt.pt a save like ours, so that our first save does not destroy it.
    """
    out = Path(out_dir)
    clean_up(out_dir)
    if not found.manifest:
        source = open_save(found)
        folder, unfinished = out / f"step_{found.step:08d}", out / f"unfinished_step_{found.step:08d}"
        unfinished.mkdir()
        real = found.path.resolve()
        try:
            os.link(real, unfinished / "ckpt.pt")  # the same file under another name: no copy, and never no name
        except OSError:
            shutil.copyfile(real, unfinished / "ckpt.pt")
        layout = {"world_size": 1, "zero": 0}
        manifest = {"step": found.step, "best_step": source.run.get("isogpt", {}).get("best_step", found.step)}
        manifest |= {"val_loss": None, "layout": layout, "block_size": source.run["model_args"]["block_size"]}
        write_whole(unfinished / "manifest.json", sealed(manifest | {"files": hash_files(unfinished)}))
        if folder.exists():  # what it held was written over, or is an older run's
            os.rename(folder, out / f"unfinished_was_{found.step:08d}")
        os.rename(unfinished, folder)
        point(out / "ckpt.pt", folder / "ckpt.pt")
    for folder in step_folders(out):
        if int(folder.name[5:]) > found.step:
            os.rename(folder, free_name(out, f"damaged_{folder.name}"))
    clean_up(out_dir)


def free_name(out: Path, name: str) -> Path:
    """A name in `out` that nothing has yet."""
    return next(p for n in range(10**6) if not (p := out / (f"{name}_{n}" if n else name)).exists())


def damaged_zip(path: Path) -> str:
    """What is wrong with a torch.save file, by the checksums of its own zip records: '' if nothing."""
    try:
        with zipfile.ZipFile(path) as z:
            bad = z.testzip()
        return f"its record {bad} does not match its checksum" if bad else ""
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        return str(e)


# ---------------------------------------------------------------------------------------------------------------------
# loading


def load(path: Path) -> dict:
    """
    The dict in a ckpt.pt, on the CPU and mapped rather than read, in nanoGPT's form without torch.compile's prefix.
    Nothing in it runs: torch's weights_only reader takes tensors and plain values.

    Raises:
        ValueError: it cannot be read, wants to run something, or lacks a part.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a damaged or hostile file raises nearly anything
        raise ValueError(f"{path} cannot be loaded: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from e
    missing = [k for k in ("model", "model_args", "iter_num") if not isinstance(state, dict) or k not in state]
    if missing:
        raise ValueError(f"{path} is no checkpoint of nanoGPT's or ours: it lacks {', '.join(missing)}")
    # nanoGPT stores torch.compile's prefix and, without flash attention, each block's causal mask
    if not isinstance(state["model"], dict) or not all(torch.is_tensor(w) for w in state["model"].values()):
        raise ValueError(f"{path}: its model is no dict of tensors")
    weights = {name.removeprefix("_orig_mod."): w for name, w in state["model"].items()}
    state["model"] = {name: w for name, w in weights.items() if not name.endswith(".attn.bias")}
    args = state["model_args"]
    absent = [k for k in ARGS if not isinstance(args, dict) or not isinstance(args.get(k), int)]
    if absent:
        raise ValueError(f"{path}: its model_args lack {', '.join(absent)}")
    if not isinstance(state["iter_num"], int) or state["iter_num"] < 0:
        raise ValueError(f"{path}: its iter_num is {state['iter_num']!r}")
    optimizer = state.get("optimizer", {"state": {}})
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("state"), dict):
        raise ValueError(f"{path}: its optimizer has no state of AdamW's")
    return state


def open_save(save: Save) -> Source:
    """
    Open a save: read everything but the tensors.

    Raises:
        ValueError: it is not what it should be.
    """
    if save.path.is_dir():
        return Source(save, save.manifest["run"])
    state = load(save.path)
    decayed = [name for name, w in state["model"].items() if w.dim() >= 2 and name != "lm_head.weight"]
    rest = [name for name, w in state["model"].items() if w.dim() < 2]
    moments = state.get("optimizer", {}).get("state", {})  # by number: nanoGPT's two groups, one after the other
    named = {name: moments[i] for i, name in enumerate(decayed + rest) if i in moments}
    run = {k: v for k, v in state.items() if k not in ("model", "optimizer")}
    run["model_args"] = {**run["model_args"], "gelu": run.get("isogpt", {}).get("gelu", "none")}
    run["best_val_loss"] = float(run.get("best_val_loss", math.inf))  # nanoGPT's is a tensor
    return Source(save, run, state["model"], named)


@torch.no_grad()
def fill(source: Source, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """
    Copy a save into a model and its optimizer, whatever layout they have: each rank reads what it holds, and no rank
    talks to another. Position embeddings are cut where the model has fewer than the save.

    Raises:
        ValueError: they do not fit, or a file cannot be read or wants to run something.
    """
    weights = parameters_by_name(model)
    moments = moments_by_name(model, optimizer) if optimizer else {}
    if source.weights is None:
        fill_from_shards(source, weights, moments)
        return
    try:
        for name, target in weights.items():
            put(target, source.weights[name][: len(target)])
        for name, saved in source.moments.items():
            for key, target in moments.get(name, {}).items():
                value = torch.as_tensor(saved[key], dtype=torch.float32)
                put(target, value[: len(target)] if target.dim() else value)
    except (KeyError, RuntimeError) as e:
        raise ValueError(f"{source.save.path} does not fit the model: {' '.join(str(e).split())[:200]}") from e


def fill_from_shards(source: Source, weights: dict, moments: dict) -> None:
    """`fill` for a save in shards: torch.distributed.checkpoint reads the pieces that overlap with this rank's."""
    import shards

    wanted = {"model": dict(weights), "optim": {name: dict(m) for name, m in moments.items()}}
    long = source.run["model_args"]["block_size"]
    cut = {}
    if WPE in weights and len(weights[WPE]) != long:  # read the whole of it, which is small, and put a part
        for group, key in [(wanted["model"], WPE)] + [
            (wanted["optim"].get(WPE, {}), k) for k in ("exp_avg", "exp_avg_sq")
        ]:
            if key in group:
                whole = torch.empty(long, *group[key].shape[1:])
                cut[id(whole)] = (group[key], whole)
                group[key] = whole
    try:
        shards.read(source.save.path, wanted)
    except shards.ERRORS as e:  # damaged files raise nearly anything
        raise ValueError(f"{source.save.path} cannot be loaded: {' '.join(str(e).split())[-300:]}") from e
    for target, whole in cut.values():
        put(target, whole[: len(target)])


def set_aside(out_dir: str) -> Path | None:
    """
    A run from scratch into a folder that holds one: move what that run left into previous_1, previous_2 and so on, so
    that nothing is overwritten and nothing old is taken for the new run's. Returns where to, or None.
    """
    out = Path(out_dir)
    names = ("ckpt.pt", "ckpt_best.pt", "metrics.jsonl", "loss.png")
    if not step_folders(out) and not (out / "ckpt.pt").exists():
        return None  # nothing that could be resumed
    left = [*step_folders(out), *(out / n for n in names if (out / n).is_symlink() or (out / n).exists())]
    number = 1 + max((int(p.name[9:]) for p in out.glob("previous_*") if p.name[9:].isdigit()), default=0)
    previous = out / f"previous_{number}"
    previous.mkdir()
    for path in left:
        os.rename(path, previous / path.name)
    return previous


# ---------------------------------------------------------------------------------------------------------------------
# from one form to the other


def read_model(source: Source) -> GPT:
    """The model of a save, whole, on the CPU."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    materialize(model, torch.device("cpu"))
    fill(source, model)
    return model


def convert(out_dir: str, form: str) -> Path:
    """Write the newest save of a folder in the other form; returns what was written."""
    found, reports = newest(out_dir)
    print("".join(f"warning: {r}\n" for r in reports), end="", file=sys.stderr)
    if not found:
        raise ValueError(f"no save in {out_dir}")
    source = open_save(found)
    model = read_model(source)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    fill(source, model, optimizer)
    out, unfinished = Path(out_dir), Path(out_dir) / f"unfinished_step_{found.step:08d}"
    clean_up(out_dir)
    run = {"isogpt": {}, "config": {}, **source.run}
    if form == "ckpt.pt":
        write_ckpt(unfinished, nanogpt_state(run, model, optimizer))
        os.replace(unfinished / "ckpt.pt", out / "ckpt.pt")
        unfinished.rmdir()
        return out / "ckpt.pt"
    if found.path.is_dir():
        raise ValueError(f"{found.path} is in shards already")
    import shards

    shards.write(unfinished, parameters_by_name(model), moments_by_name(model, optimizer))
    facts = {"best_step": run["isogpt"].get("best_step", 0), "val_loss": found.manifest.get("val_loss")}
    manifest = {"step": found.step, **facts, "layout": {"world_size": 1, "zero": 3}, "torch": torch.__version__}
    manifest |= {"block_size": run["model_args"]["block_size"], "run": run}
    if found.manifest:  # the same step in the other form makes way for this one
        os.rename(out / f"step_{found.step:08d}", out / f"unfinished_was_{found.step:08d}")
    folder = commit(unfinished, manifest | {"files": hash_files(unfinished)}, keep_last=10**9)
    clean_up(out_dir)
    return folder


def list_saves(out_dir: str) -> str:
    """A table of what is in a run's folder."""
    lines = [f"{'step':>10}  {'form':8}  {'val loss':>8}  {'GB':>7}  state"]
    for folder in step_folders(Path(out_dir)):
        manifest, problem = read_manifest(folder), damage(folder)
        size = sum(p.stat().st_size for p in folder.iterdir()) / 1e9
        form = "ckpt.pt" if (folder / "ckpt.pt").exists() else "shards"
        loss = manifest.get("val_loss")
        mark = " (best)" if manifest and manifest["best_step"] == manifest["step"] else ""
        shown = f"{loss:8.4f}" if loss is not None else "       -"
        lines.append(f"{int(folder.name[5:]):>10}  {form:8}  {shown}  {size:7.3f}  {problem or 'whole'}{mark}")
    bare = Path(out_dir) / "ckpt.pt"
    if bare.exists() and not bare.is_symlink():
        problem = damaged_zip(bare)
        step = "?" if problem else load(bare)["iter_num"]
        lines.append(
            f"{step:>10}  {'bare':8}         -  {bare.stat().st_size / 1e9:7.3f}  {problem or 'whole'}: {bare}"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line: see this file's first lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--to", choices=["ckpt.pt", "shards"])
    options = parser.parse_args()
    try:
        if not Path(options.out_dir).is_dir():
            raise ValueError(f"{options.out_dir} is no folder")
        if options.to:
            print(f"wrote {convert(options.out_dir, options.to)}")
        if options.list or not options.to:
            print(list_saves(options.out_dir))
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
