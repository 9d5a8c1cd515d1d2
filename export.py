"""
List a run's checkpoints, or convert the newest checkpoint. Neither needs the devices of the run.

    python export.py OUT_DIR --list          step, form, losses, size and state of each checkpoint
    python export.py OUT_DIR --to=ckpt.pt    one file in nanoGPT's form: OUT_DIR/ckpt.pt
    python export.py OUT_DIR --to=shards     a checkpoint in shards, as zero 1, 2 and 3 write them
    python export.py OUT_DIR --to=hf         the best one, for transformers, with a tokenizer: OUT_DIR/hf
    python export.py FOLDER --from=hf        FOLDER/ckpt.pt from a model of transformers in FOLDER
"""

import argparse
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from configurator import settings_of
from isogpt.checkpoint.ckpt_file import nanogpt_state, read_file, write_file
from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.manifest import (
    damage,
    is_run,
    make_manifest,
    read_manifest,
    step_folders,
    step_of,
    val_loss_of,
)
from isogpt.checkpoint.measures import WHOLE, bits_per_byte, measures_of
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run, vocabulary_of_weights
from isogpt.checkpoint.search import about_folder, best_checkpoint, best_folder, newest_checkpoint, open_bare
from isogpt.checkpoint.source import OpenCheckpoint, check_finite, check_weights, flat, open_checkpoint
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.common import console
from isogpt.common.files import free_name
from isogpt.data import tokenizer
from isogpt.data.vocabulary import Vocabulary
from isogpt.nn import huggingface
from isogpt.options.values import is_url
from isogpt.parallel.local_parts import local_part_of
from isogpt.parallel.parallelize import materialize
from isogpt.training import optim, optimizer_state
from model import GPT, GPTConfig

CARD_IS_OURS = "<!-- export.py writes this page again: remove this line if you edit it -->"
CARD_HEAD = f"""---
library_name: transformers
pipeline_tag: text-generation
---
{CARD_IS_OURS}
# A GPT trained with isoGPT
"""


def convert(out_dir: str, form: str, dataset: str = "") -> Path:
    """
    Write the newest valid checkpoint of a run as 'ckpt.pt' or 'shards', or the best checkpoint as 'hf', since
    sample.py also uses the best. Returns what was written.

    Args:
        dataset: for 'hf', the data set whose vocabulary is written; '': the vocabulary that the checkpoint
            records.

    Raises:
        ValueError: there is no checkpoint, the checkpoint already exists in this form, ids cannot be decoded,
            or, for 'hf', weights are not finite or transformers computes something else.
    """
    stored, damaged = best_checkpoint(out_dir) if form == "hf" else newest_checkpoint(out_dir)
    if not stored:
        others = filter(None, [about_folder(Path(out_dir))])
        raise ValueError("; ".join([f"no valid checkpoint in {out_dir}", *(damaged or others)]))
    for report in damaged:
        console.print_to_stderr(f"warning: {console.visible(report)}")
    if form == "shards" and stored.path.is_dir():
        raise ValueError(f"{stored.path} is in shards already")
    source = open_checkpoint(stored)
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    check_weights(source, model)
    if form == "shards":
        return write_shards(out_dir, source, model)
    materialize(model, torch.device("cpu"))
    if form == "hf":
        restore_checkpoint(source, model)
        check_finite(model, stored.path)
        vocabulary = vocabulary_of_run(source.run, Path(out_dir), dataset)
        return write_hf(out_dir, model, vocabulary, model_card(source, model))
    of_a_file = is_of_a_file(source)
    optimizers = [] if of_a_file else optimizers_of(model, source.run["config"])
    restore_checkpoint(source, model, optimizers)
    state = nanogpt_state(source.run, model, optimizers)
    state["optimizer"]["state"] |= read_state(source) if of_a_file else {}
    with unfinished_folder(out_dir) as unfinished:
        write_file(unfinished / "ckpt.pt", state)
        return (unfinished / "ckpt.pt").replace(Path(out_dir) / "ckpt.pt")


def write_shards(out_dir: str, source: OpenCheckpoint, model: GPT) -> Path:
    """
    Write the step folder of a ckpt.pt again, in shards. Returns the folder.

    Args:
        model: on the meta device.
    """
    from isogpt.checkpoint import sharded_files

    parts = {name: local_part_of(tensor) for name, tensor in tensors_of(source, model).items()}
    with unfinished_folder(out_dir) as unfinished:
        sharded_files.write(unfinished, parts, group=None)
        manifest = make_manifest(source.run, 1, 3, source.stored.val_loss) | {"run": source.run}
        return commit_checkpoint(unfinished, manifest, keep_last=0)


def tensors_of(source: OpenCheckpoint, model: GPT) -> dict[str, Tensor]:
    """
    The tensors of a ckpt.pt that a run would resume with, by their names in shards. They are memory-mapped:
    nothing is allocated.

    Args:
        model: on the meta device.

    Raises:
        ValueError: a tensor is missing or has a different shape.
    """
    optimizers = [] if is_of_a_file(source) else optimizers_of(model, source.run["config"])
    state = optimizer_state.state_on_meta(model, optimizers, source.names_with_state)
    wanted = flat({name: p.detach() for name, p in model.named_parameters()}, state)
    source.read({name: local_part_of(tensor) for name, tensor in wanted.items()})  # to meta: only checks
    dtypes = {name: tensor.dtype for name, tensor in wanted.items()}
    if is_of_a_file(source):
        dtypes |= {n: dtype_of_state(shape) for n, shape in source.shapes.items() if n.startswith("optim.")}
    return {name: source.tensors[name].to(dtype) for name, dtype in dtypes.items()}


def is_of_a_file(source: OpenCheckpoint) -> bool:
    """Whether the optimizer is a user's class."""
    return ":" in source.run["config"].get("optimizer", "adamw")


def read_state(source: OpenCheckpoint) -> dict[str, dict[str, Tensor]]:
    """
    Read what the optimizer of a user's class has saved, by parameter name and as it is: the class is not
    needed, and no file that a checkpoint names is run.
    """
    saved = {n: shape for n, shape in source.shapes.items() if n.startswith("optim.")}
    tensors = {n: torch.empty(shape, dtype=dtype_of_state(shape)) for n, shape in saved.items()}
    source.read({name: local_part_of(tensor) for name, tensor in tensors.items()})
    state = defaultdict(dict)
    for name, tensor in tensors.items():
        parameter, _, key = name.removeprefix("optim.").rpartition(".")
        state[parameter][key] = tensor
    return dict(state)


def dtype_of_state(shape: torch.Size) -> torch.dtype:
    """In which dtype a tensor of an optimizer of a user's class is written."""
    return torch.float32 if shape else torch.float64


def optimizers_of(model: GPT, config: dict) -> list[torch.optim.Optimizer]:
    """
    Make the optimizers of a run with this config: nanoGPT resumes with the betas and the weight decay in a
    ckpt.pt. Settings that nanoGPT's config lacks, or that are something else in a fork's, take train.py's
    defaults, but the optimizer is AdamW. The state of Muon is stored without such settings, since nanoGPT
    cannot resume it.
    """
    train = settings_of(Path(__file__).with_name("train.py"))
    values = {name: setting.default for name, setting in train.items()} | {"optimizer": "adamw"}
    for name in train.keys() & config.keys():
        with suppress(ValueError):
            values[name] = train[name].convert(config[name])
    return optim.make_optimizers(model, values)


@contextmanager
def unfinished_folder(out_dir: str) -> Iterator[Path]:
    """
    Create a folder to write in, which is deleted at the end. The name is different from a run's names:
    neither a run that writes the same step nor a run that starts in the meantime may touch the folder. Raises
    ValueError if a different conversion uses a folder here.
    """
    unfinished = Path(out_dir) / "unfinished_export"
    try:
        unfinished.mkdir()
    except FileExistsError as e:
        raise ValueError(f"{unfinished} exists: delete it, unless a different conversion is running") from e
    try:
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_hf(out_dir: str, model: GPT, vocabulary: Vocabulary, card: str) -> Path:
    """
    Write OUT_DIR/hf: weights, configuration, tokenizer and model card. An older folder is replaced, or
    renamed to hf_1, hf_2, ... if it contains other files too, such as a model card without CARD_IS_OURS.
    Returns the folder. Raises ValueError if the older folder contains checkpoints, or see huggingface.save.
    """
    c, target = model.config, Path(out_dir) / "hf"
    if is_run(str(target)):
        raise ValueError(f"{target} contains checkpoints, which would be deleted: rename it")
    with unfinished_folder(out_dir) as unfinished:
        token_ids = tokenizer.save_tokenizer(unfinished / "hf", vocabulary, c.vocab_size, c.block_size)
        huggingface.save(unfinished / "hf", model, token_ids)
        (unfinished / "hf" / "README.md").write_text(card, encoding="utf-8")
        if target.exists():
            names = {path.name for path in (unfinished / "hf").iterdir()}
            older_card = target / "README.md"
            if older_card.is_file() and CARD_IS_OURS not in older_card.read_text(errors="replace"):
                names.remove("README.md")
            if others := sorted(path.name for path in target.iterdir() if path.name not in names):
                kept = target.rename(free_name(Path(out_dir), "hf", first=1))
                console.print_to_stderr(
                    f"note: {target} also contained {console.shortened(others)}: it is now {kept}"
                )
            else:
                target.rename(unfinished / "old")
        return (unfinished / "hf").rename(target)


def model_card(source: OpenCheckpoint, model: GPT) -> str:
    """
    The README.md of an exported model: what it is, its validation loss, and what the loss was measured on.
    """
    stored, tokens = source.stored, source.run["isogpt"].get("tokens")
    loss, bits = stored.val_loss, stored.bits_per_byte
    measures = stored.manifest.get("measures") or measures_of(source.run)
    dataset, digest = Path(str(measures.get("dataset") or "")).name, measures.get("digest")
    if sources := source.run["isogpt"].get("sources"):
        dataset = ",".join(f"{name}:{one['of_1000']}" for name, one in sources.items())
    sequences = measures.get("sequences")
    measured_on = (
        "all of val.bin"
        if sequences == WHOLE
        else sequences and f"{console.count_text(sequences, 'sequence')} of val.bin"
    )
    facts = {
        "parameters": f"{model.get_num_params():,}",
        "training steps": f"{stored.step:,}" + (f", {tokens:,} tokens" if tokens else ""),
        "validation loss": "" if loss is None else f"{loss:.4f} nats per token",
        "bits per byte": "" if bits is None else f"{bits:.4f}",
        "data set": f"{dataset}, digest {digest}" if digest else dataset,
        "measured on": measured_on,
        "context": f"{model.config.block_size:,} tokens",
    }
    rows = [f"| {name} | {console.visible(str(value))} |" for name, value in facts.items() if value]
    return "\n".join([CARD_HEAD, "| | |", "|---|---|", *rows, ""])


def convert_hf(folder: str) -> Path:
    """
    Write FOLDER/ckpt.pt, step 0 of a run, from the model of transformers in FOLDER; returns the file.

    Raises:
        ValueError: the model cannot be loaded, or FOLDER contains checkpoints.
    """
    if is_run(folder):
        raise ValueError(
            f"{folder} contains checkpoints, which would be hidden by the new one: use a different folder"
        )
    model = GPT.from_pretrained(folder)
    vocabulary = vocabulary_of_weights(folder, model.config.vocab_size)
    run = {"model_args": model.describe(), "iter_num": 0, "best_val_loss": float("inf"), "config": {}}
    run["isogpt"] = {"vocabulary": vocabulary.describe()}
    state = nanogpt_state(run, model, optimizers_of(model, {}))
    with unfinished_folder(folder) as unfinished:
        write_file(unfinished / "ckpt.pt", state)
        return (unfinished / "ckpt.pt").replace(Path(folder) / "ckpt.pt")


def list_checkpoints(out_dir: str) -> str:
    """A table of the checkpoints in a run's folder."""
    out = Path(out_dir)
    lines = [f"{'step':>10}  {'form':8}  {'val loss':>8}  {'bits/byte':>9}  {'GB':>7}  state"]
    manifests = {folder: read_manifest(folder) for folder in step_folders(out)}
    newest = next(filter(None, manifests.values()), None)  # the newest manifest names the best step
    best = best_folder(out, newest) if newest else None
    for folder, manifest in manifests.items():
        try:
            state = damage(folder) or "valid"
        except ValueError as e:  # it may be intact
            state = str(e)
        state += " (best)" if folder == best else ""
        form = "ckpt.pt" if (folder / "ckpt.pt").exists() else "shards"
        with suppress(FileNotFoundError):  # a live run has just deleted the file
            val_loss = val_loss_of(manifest) if manifest else None
            losses = (val_loss, bits_per_byte(val_loss, manifest.get("measures", {})))
            lines.append(row(step_of(folder), form, losses, folder.iterdir(), state))
    bare = out / "ckpt.pt"
    if bare.exists() and not bare.is_symlink():
        try:
            stored = open_bare(bare, read_file(bare, verify=True))
            losses = (stored.val_loss, stored.bits_per_byte)
            lines.append(row(stored.step, "bare", losses, [bare], f"valid: {bare}"))
        except ValueError as e:
            lines.append(row("?", "bare", (None, None), [bare], str(e)))
    return "\n".join(lines if len(lines) > 1 else [*lines, about_folder(out)]).rstrip()


def row(
    step: int | str, form: str, losses: tuple[float | None, float | None], files: Iterable[Path], state: str
) -> str:
    """A line of the table; `losses` are in nats per token and in bits per byte."""
    loss, bits = ("-" if value is None else f"{value:.4f}" for value in losses)
    size = sum(p.stat().st_size for p in files) / 1e9
    return f"{step:>10}  {form:8}  {loss:>8}  {bits:>9}  {size:7.3f}  {state}"


def main() -> None:
    """The command line: see the first lines of this file."""
    console.prepare()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", help="the run's folder")
    parser.add_argument("--list", action="store_true", help="list the checkpoints (the default)")
    parser.add_argument(
        "--to", choices=["ckpt.pt", "shards", "hf"], help="convert the newest checkpoint; hf: the best"
    )
    parser.add_argument("--from", dest="source", choices=["hf"], help="convert a model of transformers")
    parser.add_argument(
        "--dataset",
        default="",
        type=os.path.expanduser,
        help="with --to=hf: the data set whose vocabulary is written",
    )
    options = parser.parse_args()
    try:
        if is_url(options.out_dir):
            raise ValueError(f"{options.out_dir} is a URL: download it to a folder, and give the folder")
        if not Path(options.out_dir).is_dir():
            raise ValueError(f"{options.out_dir} is not a folder: give the run's folder")
        if options.to:
            console.print_result(f"wrote {convert(options.out_dir, options.to, options.dataset)}")
        if options.source:
            console.print_result(f"wrote {convert_hf(options.out_dir)}")
        if options.list or not (options.to or options.source):
            console.print_result(list_checkpoints(options.out_dir))
    except ValueError as e:
        sys.exit(f"error: {console.visible(str(e))}")
    except OSError as e:
        sys.exit(f"error: {console.visible(str(e))}; no checkpoint in {options.out_dir} was lost")


if __name__ == "__main__":
    main()
