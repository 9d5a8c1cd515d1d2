"""
A run's folder: find, verify, claim, link and prune its checkpoints.

    <out_dir>/step_00001200/ckpt.pt              the state in nanoGPT's form, if one process holds all of it (zero 0)
    <out_dir>/step_00001200/*.distcp, .metadata  or in shards, each rank's part, by parameter name
    <out_dir>/step_00001200/manifest.json        the layout and a checksum of each file
    <out_dir>/ckpt.pt, ckpt_best.pt              links to the newest and the best ckpt.pt

A checkpoint is written in a folder of another name and renamed when it is complete and on the disk: a folder called
step_* is complete. The checksums detect damage that happens later.
"""

import hashlib
import json
import math
import operator
import os
import re
import shutil
import socket
import time
import uuid
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch

from isogpt.agree import broadcast
from isogpt.files import about_pointer, read_records, sync_folder, write_whole
from isogpt.launch import Launch
from isogpt.network import this_machine

MARK = "PREEMPTED"  # this file means that the run was stopped on request and is not finished
GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # values of init_from that are not folders
REPLACED = "unfinished_was_"  # a checkpoint that is being replaced by another form of it: see `commit`
STEP = re.compile(rf"(?:{REPLACED})?step_(\d{{8,}})")
NONE = -1  # best_step if no checkpoint on disk has the best loss
# A numpy scalar is plain data: a value and its dtype. NumPy 1 called the module numpy.core.
SCALAR = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar
PLAIN = (
    (SCALAR, "numpy._core.multiarray.scalar"),
    (SCALAR, "numpy.core.multiarray.scalar"),
    np.dtype,
    *{type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"], "?")},
)
UNFINISHED = re.compile(r"unfinished_([0-9a-f]{8}_)?step_\d{8,}")  # a checkpoint that a run was writing or deleting


@dataclass(frozen=True)
class Found:
    """
    A checkpoint on disk: its ckpt.pt or its folder of shards, its step, its manifest (empty for a bare ckpt.pt), and
    the validation loss of its weights (None if that is not known).

    `records` is the digest_of_records of a bare ckpt.pt. `is_verified` is whether this is the file or folder
    whose checksums rank 0 has compared, not a copy, see `share`.
    """

    path: Path
    step: int
    manifest: dict = field(default_factory=dict)
    val_loss: float | None = None
    records: str = ""
    is_verified: bool = True


# ---------------------------------------------------------------------------------------------------------------------
# finding and verifying


def step_folders(out: Path) -> list[Path]:
    """The step folders, newest first. A replaced one stands for its step until the new one is in place."""
    found = sorted((f for f in out.glob("*step_*") if STEP.fullmatch(f.name)), reverse=True)
    folders = {step_of(f): f for f in found}  # of two names for a step, step_* comes last and thus counts
    return [folders[step] for step in sorted(folders, reverse=True)]


def step_of(folder: Path) -> int:
    """The step in the name of a step folder."""
    return int(STEP.fullmatch(folder.name)[1])


def step_folder(out: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return out / f"step_{step:08d}"


def steps_in(folder: str) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    return [step_of(step_folder) for step_folder in step_folders(Path(folder))]


def is_run(folder: str) -> bool:
    """Whether a folder holds checkpoints of a run: ours or nanoGPT's."""
    return bool(folder) and (bool(step_folders(Path(folder))) or (Path(folder) / "ckpt.pt").exists())


def make_manifest(run: dict, world_size: int, zero: int, val_loss: float | None) -> dict:
    """
    What manifest.json holds besides the files' checksums.

    Args:
        run: the state that is not tensors.
        val_loss: of this state, if it was evaluated.
    """
    layout = {"world_size": world_size, "zero": zero}
    facts = {"step": run["iter_num"], "best_step": best_step_of(run), "best_val_loss": run["best_val_loss"]}
    facts |= {"val_loss": val_loss, "measures": measures_of(run), "layout": layout}
    return facts | {"block_size": run["model_args"]["block_size"], "torch": torch.__version__}


def sealed(manifest: dict) -> str:
    """The text of manifest.json, whose last entry is a checksum of all others."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "manifest_sha256": digest}, indent=1)


def read_manifest(folder: Path) -> dict:
    """The manifest of a step folder; empty if it is missing or damaged."""
    try:
        text = (folder / "manifest.json").read_text()
        manifest = {k: v for k, v in json.loads(text).items() if k != "manifest_sha256"}
    except (OSError, ValueError, AttributeError):
        return {}
    return manifest if text == sealed(manifest) else {}


def hash_files(folder: Path) -> dict:
    """The manifest's entries for all files in a folder: size and SHA-256."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(folder: Path) -> str:
    """What is wrong with a step folder: '' if every file's checksum matches the manifest."""
    manifest = read_manifest(folder)
    if not manifest or step_of(folder) != manifest["step"]:
        return "its manifest.json is missing or damaged"
    problems = (damaged_file(folder / name, manifest) for name in manifest["files"])
    return next((problem for problem in problems if problem), "")


def damaged_file(path: Path, manifest: dict) -> str:
    """What is wrong with a file of a step folder: '' if its checksum matches the manifest."""
    try:
        actual = sha256_of(path)
    except OSError as e:
        return f"{path.name} cannot be read ({e.strerror})"
    return "" if actual == manifest["files"][path.name]["sha256"] else f"the checksum of {path.name} does not match"


def digest_of_records(path: Path) -> str:
    """A digest of the names, sizes and checksums in the directory of a torch.save file; '' if it has none."""
    try:
        with zipfile.ZipFile(path) as z:
            records = [(entry.filename, entry.file_size, entry.CRC) for entry in z.infolist()]
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return ""
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def damaged_zip(path: Path) -> str:
    """What is wrong with a torch.save file: '' if the checksums of its zip records match."""
    try:
        with zipfile.ZipFile(path) as z:
            bad = z.testzip()
        return f"the checksum of its record {bad} does not match" if bad else ""
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        return str(e)


def read_file(path: Path, verify: bool = False) -> dict:
    """
    The dict in a ckpt.pt, memory-mapped. Nothing in it runs: weights_only accepts tensors and plain values.

    Args:
        verify: check its checksums, which reads the whole file.

    Raises:
        ValueError: it is damaged, cannot be loaded, would run code, or is not a checkpoint.
    """
    if pointer := about_pointer(path):
        raise ValueError(f"{path} is {pointer}")
    if verify and (problem := damaged_zip(path)):
        raise ValueError(f"{path} is damaged: {problem}")
    try:
        with torch.serialization.safe_globals(PLAIN):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a damaged or hostile file raises nearly anything
        raise ValueError(f"{path} cannot be loaded: {why_not_loaded(e)}") from e
    missing = [k for k in ("model", "model_args", "iter_num") if not isinstance(state, dict) or k not in state]
    if missing:
        raise ValueError(f"{path} is not a nanoGPT or isoGPT checkpoint: it has no {', '.join(missing)}")
    step, best_loss, config = (state.get(name) for name in ("iter_num", "best_val_loss", "config"))
    try:
        state["iter_num"] = operator.index(step)
    except TypeError:
        raise ValueError(f"{path}: its iter_num is {step!r}") from None
    if state["iter_num"] < 0:
        raise ValueError(f"{path}: its iter_num is {step!r}")
    try:  # a tensor in nanoGPT's
        state["best_val_loss"] = math.inf if best_loss is None else float(best_loss)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{path}: its best_val_loss is {best_loss!r}, not a number") from None
    state["config"] = config if isinstance(config, dict) else {}
    return state


def why_not_loaded(error: Exception) -> str:
    """Why torch.load refused a file, in one line: PyTorch's message is several, with escape codes."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return f"it contains {refused[1]}, and only tensors and plain values are read"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def best_step_of(run: dict) -> int:
    """
    The step of the checkpoint that holds best_val_loss, as a checkpoint records it; NONE if none on disk does. In
    nanoGPT's checkpoints it is the loss of the checkpoint itself, since nanoGPT saves where it evaluates; the step
    shows that a fork saved at a different one.
    """
    ours = run.get("isogpt", {})
    if "best_step" in ours:
        return ours["best_step"]
    interval = run["config"].get("eval_interval")
    was_evaluated = not isinstance(interval, int) or interval < 1 or run["iter_num"] % interval == 0
    return run["iter_num"] if was_evaluated and math.isfinite(run["best_val_loss"]) else NONE


def measures_of(run: dict) -> dict:
    """What determined a checkpoint's validation losses, see `what_is_measured`."""
    return run.get("isogpt", {}).get("measures") or what_is_measured(run.get("config") or {})


def what_is_measured(config: dict, digest: str | None = None) -> dict:
    """
    What determines the value of a validation loss; None for what is not known. Losses are compared only if they
    measure the same. The number of processes and the micro-batch that they compute are not part of it.
    """
    found = {name: config.get(name) for name in ("dataset", "block_size", "seed")}
    counts = [config.get(name) for name in ("eval_iters", "batch_size")]
    sequences = math.prod(counts) if all(isinstance(n, int) for n in counts) else None
    return found | {"digest": digest, "sequences": sequences}


def changed_measures(before: dict, now: dict) -> list[str]:
    """A phrase for each difference between two results of `what_is_measured`. What one of them lacks does not count."""
    both = {name for name in now if now[name] is not None and before.get(name) is not None}
    names = ["digest" if "digest" in both else "dataset", "block_size", "sequences", "seed"]
    changed = [name for name in names if name in both and before[name] != now[name]]
    phrases = {name: f"{name} is {now[name]}, not {before.get(name)}" for name in changed}
    if "digest" in changed:
        is_renamed = before.get("dataset") != now["dataset"]
        phrases["digest"] = f"dataset is {now['dataset']}, not {before.get('dataset')}"
        if not is_renamed:
            phrases["digest"] = f"the files of dataset {now['dataset']} are different"
    if "sequences" in changed:
        phrases["sequences"] = f"eval_iters * batch_size is {now['sequences']}, not {before['sequences']}"
    return list(phrases.values())


def open_folder(folder: Path) -> Found:
    """The checkpoint in a step folder that is not damaged."""
    manifest = read_manifest(folder)
    path = folder / "ckpt.pt" if "ckpt.pt" in manifest["files"] else folder
    return Found(path, manifest["step"], manifest, val_loss_of(manifest))


def val_loss_of(manifest: dict) -> float | None:
    """The validation loss of the checkpoint with this manifest; None if it is not known."""
    if manifest.get("best_step") == manifest["step"]:
        return manifest.get("best_val_loss")
    return manifest.get("val_loss")


def open_bare(path: Path, state: dict) -> Found:
    """The checkpoint in a ckpt.pt without a manifest."""
    is_best = best_step_of(state) == state["iter_num"]
    val_loss = state["best_val_loss"] if is_best else None
    return Found(path, state["iter_num"], val_loss=val_loss, records=digest_of_records(path))


def newest(out_dir: str, step: int = -1) -> tuple[Found | None, list[str]]:
    """
    The checkpoint to resume from: the newest that verifies, a step folder or a bare ckpt.pt that nanoGPT wrote.

    Args:
        step: only this step's checkpoint; -1: the newest.

    Returns:
        (the checkpoint or None, a sentence for each newer one that is damaged, and for a bare one that is older)
    """
    out, reports, found = Path(out_dir), [], None
    for folder in (f for f in step_folders(out) if step in (-1, step_of(f))):
        if not (problem := damage(folder)):
            found = open_folder(folder)
            break
        reports.append(f"{folder} is damaged: {problem}")
    bare = out / "ckpt.pt"
    if not bare.exists() or step != -1:
        return found, reports
    # ckpt.pt is normally our link to a checkpoint that was verified above. A file that nanoGPT wrote, perhaps through
    # the link, is newer than all of ours, since each of our checkpoints restores the link; a copy of one of ours is
    # used if it is further on than what was found.
    linked = STEP.fullmatch(bare.resolve().parent.name)
    if linked and found and int(linked[1]) <= found.step and not any(linked[0] in r for r in reports):
        return found, reports
    try:
        state = read_file(bare, verify=True)
    except ValueError as e:
        return found, reports if linked else [*reports, str(e)]
    step = found.step if found else -1
    if "isogpt" not in state or (not linked and state["iter_num"] > step):
        return open_bare(bare, state), reports
    if not linked and state["iter_num"] < step:
        reports.append(f"{bare}, step {state['iter_num']}, is not used, since step {step} is further on: to use the "
                       "file, put it in an empty folder, and set --out_dir= to the folder")  # fmt: skip
    return found, reports


def best(out_dir: str) -> tuple[Found | None, list[str]]:
    """The checkpoint with the best validation loss, or the newest if that one is damaged; as `newest` returns it."""
    found, reports = newest(out_dir)
    alone = Path(out_dir) / "ckpt_best.pt"
    if not found and alone.exists() and not alone.is_symlink():  # the file was copied without its folder
        return open_bare(alone, read_file(alone, verify=True)), reports
    folder = best_folder(Path(out_dir), found.manifest) if found and found.manifest else None
    if not folder:
        return found, reports
    if problem := damage(folder):
        return found, [*reports, f"{folder} is damaged: {problem}"]
    its_best = open_folder(folder)
    if its_best.step == found.manifest["best_step"]:  # it may have been evaluated only after it was saved
        its_best = replace(its_best, val_loss=found.manifest.get("best_val_loss"))
    return its_best, reports


def best_folder(out: Path, manifest: dict) -> Path | None:
    """
    The checkpoint with the best validation loss, by the manifest of the newest one. If the step that it names was not
    saved, because the disk was full for instance, it is the checkpoint with the lowest loss that measures the same.
    None if no checkpoint was evaluated.
    """
    named = step_folder(out, manifest["best_step"])
    if named.exists():
        return named
    losses = {}
    for folder in step_folders(out):
        other = read_manifest(folder)
        if not other or other["step"] > manifest["step"] or val_loss_of(other) is None:
            continue
        if not changed_measures(other.get("measures", {}), manifest.get("measures", {})):
            losses[folder] = val_loss_of(other)
    return min(losses, key=losses.get, default=None)


def find_start(init_from: str, out_dir: str, resume_step: int,
               launch: Launch) -> tuple[Found | None, bool, list[str]]:  # fmt: skip
    """
    What `init_from` means for a training run (rank 0). A restart of the launch that entered the folder continues with
    what this launch has written, whatever the command says: the command was followed at the launch's first start.

    Returns:
        (the checkpoint to load or None, whether to resume from it rather than to load its weights alone, warnings)

    Raises:
        ValueError: there is nothing to resume from.
    """
    weights_from = init_from.removeprefix("auto:")
    is_restart = was_entered_by(Path(out_dir), launch)
    if is_restart or init_from in ("resume", "auto") or weights_from != init_from:
        found, reports = newest(out_dir, -1 if is_restart else resume_step)
        if found:
            if is_restart:
                print(f"restart: continues what this launch has written to {out_dir}, step {found.step}", flush=True)
            return found, True, reports
        if reports or init_from == "resume":
            problem = f"no checkpoint to resume from in {out_dir}: set --out_dir= to the run's folder"
            if resume_step != -1:
                steps = ", ".join(map(str, steps_in(out_dir)))
                problem = f"no step {resume_step} to resume from in {out_dir}, which has {steps or 'no checkpoints'}"
                problem += ": set --resume_step= to one of these, or --out_dir= to the run's folder"
            raise ValueError("; ".join([problem, *reports]))
    if weights_from not in ("scratch", "resume", "auto", *GPT2) and is_run(weights_from):
        found, reports = best(weights_from)
        if not found:
            raise ValueError("; ".join([f"no valid checkpoint in {weights_from}", *reports]))
        return found, False, reports
    return None, False, []


def find_rollback(out_dir: str, owner: str) -> tuple[Found | None, list[str]]:
    """
    The checkpoint that the folder's owner rolls back to, as `newest` returns it (rank 0). Newer ones, which are
    damaged, are renamed as on a resume.

    Raises:
        ValueError: another run has claimed the folder.
    """
    check_owner(Path(out_dir), owner)
    found, reports = newest(out_dir)
    if found:
        continue_from(out_dir, found)
    return found, reports


def share(found: Found | None, folder: str) -> Found | None:
    """
    Rank 0's `found`, which is in `folder`, with the path under which this rank sees it (all ranks): machines may mount
    the same folder under different paths, or have copies of it. `check_same` compares what is there.
    """
    # only a name below the folder is sent: rank 0's path need not exist on other machines
    name = broadcast(str(found.path.relative_to(folder)) if found else None)
    found, verified = broadcast((found, identity(found.path) if found else None))
    if not found:
        return None
    path = Path(folder) / name
    return replace(found, path=path, is_verified=identity(path) == verified)


def identity(path: Path) -> tuple[str, int, int] | None:
    """
    What two processes have in common if they see the same file or folder: the machine and its number. One that two
    machines share counts as two. None if it is not there.
    """
    with suppress(OSError):
        status = path.stat()
        return this_machine()[1], status.st_dev, status.st_ino
    return None


def check_same(found: Found) -> None:
    """
    Raise ValueError if `found`, which may come from rank 0, is not what is on the disk of this machine, or if a
    ckpt.pt, which rank 0 may not have read here, is damaged. Shards are verified by the ranks that read them.
    """
    folder = found.path if found.path.is_dir() else found.path.parent
    where = f"{found.path.absolute()} on {socket.gethostname()}"
    if found.manifest:
        is_there = read_manifest(folder) == found.manifest
    else:
        is_there = found.path.exists() and found.records in ("", digest_of_records(found.path))
    if not is_there:
        raise ValueError(f"{where} is not the checkpoint that rank 0 found, and all ranks read it: use a folder on a "
                         "file system that all machines share, or copy the checkpoint from rank 0's machine to the "
                         "others")  # fmt: skip
    if not found.is_verified and found.path.is_file():
        problem = damaged_zip(found.path) if not found.manifest else damaged_file(found.path, found.manifest)
        if problem:
            raise ValueError(f"{where} is damaged: {problem}. Copy it from rank 0's machine again")


# ---------------------------------------------------------------------------------------------------------------------
# claiming a folder for a run (rank 0)


def prepare(out_dir: str) -> None:
    """Create the run's folder. Raises ValueError if nothing can be written to it."""
    try:
        trial = Path(out_dir) / "unfinished_trial"
        trial.mkdir(parents=True, exist_ok=True)
        trial.rmdir()
    except OSError as e:
        raise ValueError(f"out_dir {out_dir} cannot be written to ({e.strerror}): set another --out_dir=") from e


def write_owner(out: Path, owner: str, launch: Launch | None) -> None:
    """Make `owner` the folder's owner; `launch`: the launch that has entered the folder, if the folder is prepared."""
    write_whole(out / "owner", json.dumps({"owner": owner, "launch": asdict(launch) if launch else None}))


def read_owner(out: Path) -> dict:
    """What write_owner wrote; empty if there is nothing."""
    with suppress(OSError, ValueError):
        found = json.loads((out / "owner").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def was_entered_by(out: Path, launch: Launch) -> bool:
    """Whether an earlier start of this launch has entered the folder, and no other launch since then."""
    with suppress(KeyError, TypeError):  # there is none, or someone else's
        return launch.continues(Launch(**read_owner(out)["launch"]))
    return False


def is_owned(out: Path, owner: str, patience_s: float) -> bool:
    """Whether `out` is the folder that `owner` has just claimed; waits, since network file systems can be late."""
    end = time.monotonic() + patience_s
    while True:
        with suppress(OSError):
            os.listdir(out)  # NFS then looks for new files
        if read_owner(out).get("owner") == owner:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)


def unfinished_folder(out: Path, owner: str, step: int) -> Path:
    """The folder in which `owner` writes a step's checkpoint."""
    return out / f"unfinished_{owner[:8]}_step_{step:08d}"


def try_to_write(out: Path, owner: str, rank: int) -> str:
    """Write a file as a checkpoint in shards does (several ranks). Returns why that is not possible, or ''."""
    try:
        trial = unfinished_folder(out, owner, 0) / f"trial_{rank}"
        trial.parent.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"\0")
    except OSError as e:
        return (f"out_dir {out.absolute()} cannot be written to on {socket.gethostname()} ({e.strerror}), and all "
                "ranks write checkpoints in shards: set another --out_dir=, or let this user write there")  # fmt: skip
    return ""


def check_owner(out: Path, owner: str) -> None:
    """Raise ValueError if another run has claimed the folder."""
    now = read_owner(out).get("owner", owner)  # it may have been deleted
    if owner and now != owner:
        raise ValueError(f"another run was started in {out}: this one stops, and its checkpoints are kept")


def claim_again(out: Path, owner: str, launch: Launch | None) -> str:
    """
    If the file that enter_folder wrote is gone, write it again, so that a restart still finds what this launch writes
    from here on (the owner). Returns a sentence for the user, or ''.
    """
    if os.path.lexists(out / "owner"):
        return ""
    with suppress(OSError):  # then no checkpoint can be written either, which is reported
        out.mkdir(parents=True, exist_ok=True)
        write_owner(out, owner, launch)
    kept = ", ".join(map(str, steps_in(str(out)))) or "none"
    return (f"{out.absolute()} is not the folder in which this run began: it was deleted, or its file system is no "
            "longer mounted. Checkpoints are written to the folder that has this name now, which contains the steps: "
            f"{kept}")  # fmt: skip


def clean_up(out: Path) -> None:
    """
    Remove what killed runs left of unfinished checkpoints and deletions (the owner, before its first checkpoint). A
    checkpoint that a killed conversion was about to replace gets its name back.
    """
    for path in out.glob("unfinished_*"):
        was_replaced = STEP.fullmatch(path.name)
        if was_replaced and not step_folder(out, step_of(path)).exists():
            os.rename(path, step_folder(out, step_of(path)))
        elif was_replaced or UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def enter_folder(out_dir: str, found: Found | None, launch: Launch) -> str:
    """
    Prepare the folder for this run, which resumes from `found` or starts from scratch, and make the run its owner;
    returns the owner's identifier. Checkpoints that an earlier run, which is still alive, writes after this do not
    count.
    """
    prepare(out_dir)
    out, owner = Path(out_dir), uuid.uuid4().hex
    is_restart = was_entered_by(out, launch)
    write_owner(out, owner, launch if is_restart else None)
    clean_up(out)
    if found:
        continue_from(out_dir, found)
    elif is_restart:
        pass  # what is there was written by this launch before its first checkpoint
    elif aside := set_aside(out_dir):
        print(f"{out_dir} contained an earlier run, which was moved to {aside}", flush=True)
    (out / MARK).unlink(missing_ok=True)
    write_owner(out, owner, launch)  # from here on, what is in the folder is this launch's
    return owner


def mark_preempted(out_dir: str, owner: str, step: int, reason: str) -> None:
    """
    Write the file that says that the run was stopped on request before its end; the next start removes it.

    Raises:
        ValueError: another run has claimed the folder. A file in it would put that run back into the queue.
    """
    check_owner(Path(out_dir), owner)
    (Path(out_dir) / MARK).write_text(json.dumps({"iter": step, "reason": reason}) + "\n")


def continue_from(out_dir: str, found: Found) -> None:
    """
    Prepare the folder for a run that resumes from `found`: rename newer checkpoints, which are damaged or were not
    chosen, since they must not count as kept; and turn a bare ckpt.pt into a step folder, so that the first checkpoint
    does not overwrite it.
    """
    out = Path(out_dir)
    if not found.manifest:
        unfinished = out / f"unfinished_step_{found.step:08d}"
        unfinished.mkdir()
        try:  # a second name for the file: no copy, and no moment without a name
            os.link(found.path.resolve(), unfinished / "ckpt.pt")
        except OSError:
            shutil.copyfile(found.path, unfinished / "ckpt.pt")
        manifest = make_manifest(read_file(found.path), 1, 0, found.val_loss)
        commit(unfinished, manifest, keep_last=0, replace=True)
    for folder in step_folders(out):
        if step_of(folder) > found.step:
            kind = "damaged" if damage(folder) else "abandoned"
            os.rename(folder, free_name(out, f"{kind}_{folder.name}"))
    if found.manifest:
        abandon_bare(out, found)
    folder = step_folder(out, found.step)
    link(out, folder, best_folder(out, read_manifest(folder)))


def abandon_bare(out: Path, found: Found) -> None:
    """
    Rename a ckpt.pt that is not a link, such as export.py writes from shards, if `newest` would prefer it to the step
    folder that a run resumes from, or if a link would replace it.
    """
    bare = out / "ckpt.pt"
    if not bare.is_file() or bare.is_symlink():
        return
    with suppress(ValueError):  # what cannot be read is never chosen
        state = read_file(bare)
        is_preferred = "isogpt" not in state or state["iter_num"] > found.step
        is_replaced = found.path.is_file() and state["iter_num"] != found.step
        if is_preferred or is_replaced:
            os.rename(bare, free_name(out, "abandoned_ckpt.pt"))


def free_name(out: Path, name: str, first: int = 0) -> Path:
    """The first path of `out`/`name` (unless `first` is 1), name_1, name_2, ... that does not exist."""
    return next(p for n in count(first) if not (p := out / (f"{name}_{n}" if n else name)).exists())


def set_aside(out_dir: str) -> Path | None:
    """
    Prepare the folder for a run from scratch: move what an earlier run left to previous_1, previous_2, ..., so that
    nothing is overwritten or mistaken for the new run's. Returns where to, or None.
    """
    out = Path(out_dir)
    has_logged_steps = any("loss" in r or "val_loss" in r for r in read_records(out / "metrics.jsonl"))
    if not is_run(out_dir) and not has_logged_steps:
        return None
    previous = free_name(out, "previous", first=1)
    previous.mkdir()
    others = [out / name for name in ("ckpt.pt", "ckpt_best.pt", "metrics.jsonl", "loss.png", "tensorboard")]
    for path in step_folders(out) + [path for path in others if os.path.lexists(path)]:
        os.rename(path, previous / path.name)
    return previous


# ---------------------------------------------------------------------------------------------------------------------
# adding a checkpoint (rank 0)


def commit(unfinished: Path, manifest: dict, keep_last: int, owner: str = "", replace: bool = False) -> Path:
    """
    Complete a checkpoint whose files are written: checksums, rename, links; then delete those that are not kept.

    Args:
        manifest: what make_manifest returned.
        replace: whether to replace a valid checkpoint of the same step. Without it that one is kept, since a run's
            state at a step is always the same.

    Raises:
        ValueError: another run has claimed the folder. OSError: the disk is full, for instance.
    """
    out = unfinished.parent
    folder = step_folder(out, manifest["step"])
    try:
        write_whole(unfinished / "manifest.json", sealed(manifest | {"files": hash_files(unfinished)}))
        if owner:
            check_owner(out, owner)
        if folder.exists() and not replace and not damage(folder):
            shutil.rmtree(unfinished)
        else:
            old = out / f"{REPLACED}{folder.name}"  # found under this name too, until the new one is in place
            if folder.exists():
                os.rename(folder, old)
            os.rename(unfinished, folder)
            shutil.rmtree(old, ignore_errors=True)
        sync_folder(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    best = best_folder(out, manifest)
    link(out, folder, best)
    prune(out, folder, best, keep_last, manifest["block_size"])
    return folder


def link(out: Path, newest_folder: Path, best: Path | None) -> None:
    """Point ckpt.pt and ckpt_best.pt to the newest and the best checkpoint (None: none is), unless it is in shards."""
    for path, target in ((out / "ckpt.pt", newest_folder), (out / "ckpt_best.pt", best)):
        if target and (target / "ckpt.pt").exists():
            point(path, target / "ckpt.pt")
        elif path.is_symlink() and (not target or not path.exists()):
            path.unlink()  # it pointed to a checkpoint that was deleted or renamed, or that is no longer the best


def point(path: Path, target: Path) -> None:
    """Make `path` a relative symbolic link to `target`, or a copy if the file system has no links; atomically."""
    other = path.with_name(path.name + ".tmp")
    other.unlink(missing_ok=True)
    try:
        os.symlink(target.relative_to(path.parent), other)
    except OSError:
        shutil.copyfile(target, other)
    os.replace(other, path)


def prune(out: Path, newest_folder: Path, best: Path | None, keep_last: int, block_size: int) -> None:
    """
    Delete all checkpoints but the last `keep_last` (0: keep all), the best, and those of another block_size, which are
    from before the context was shortened.
    """
    folders = [f for f in step_folders(out) if step_of(f) <= step_of(newest_folder)]
    for folder in folders[keep_last:] if keep_last else []:
        if folder != best and read_manifest(folder).get("block_size", block_size) == block_size:
            doomed = out / f"unfinished_{folder.name}"  # half deleted, it must not be called step_*
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    link(out, newest_folder, best)  # ckpt.pt may have pointed to a deleted checkpoint
