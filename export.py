"""
List a run's checkpoints, or convert the newest checkpoint. Neither needs the devices of the run.

    python export.py OUT_DIR --list          step, form, losses, size and state of each checkpoint
    python export.py OUT_DIR --to=ckpt.pt    one file in nanoGPT's form: OUT_DIR/ckpt.pt
    python export.py OUT_DIR --to=hf         the best one, for transformers, with a tokenizer: OUT_DIR/hf
    python export.py FOLDER --from=hf        FOLDER/ckpt.pt from a model of transformers in FOLDER
"""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from isogpt.checkpoint import ckpt_file, huggingface, manifest, measures, search
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.checkpoint.source import OpenCheckpoint, check_finite, check_weights, open_checkpoint
from isogpt.checkpoint.state import read_extra, restore_checkpoint
from isogpt.common import console, interrupt
from isogpt.common.files import free_name
from isogpt.data import tokenizer
from isogpt.data.vocabulary import Vocabulary
from isogpt.parallel.parallelize import materialize
from isogpt.training import optim
from model import GPT, GPTConfig

# a folder to write in, whose name is not one of a run's: no run that is live or starts touches it
UNFINISHED = "unfinished_export_"


def convert(out_dir: str, form: str, dataset: str = "") -> Path:
    """
    Write the newest valid checkpoint of a run as 'ckpt.pt', or the best checkpoint as 'hf', since sample.py
    also uses the best. Returns what was written, or nanoGPT's own ckpt.pt, which stays as it is.
    OUT_DIR/ckpt.pt, a link before, becomes a file.

    Args:
        dataset: for 'hf', the data set whose vocabulary is written; '': the vocabulary that the checkpoint
            records.

    Raises:
        ValueError: there is no checkpoint, ids cannot be decoded, or, for 'hf', weights are not finite or
            transformers computes something else.
    """
    stored, damaged = search.find_checkpoint(out_dir, best=form == "hf")
    if not stored:
        raise manifest.no_checkpoint(out_dir, damaged)
    for report in damaged:
        console.print_to_stderr(f"warning: {report}")
    source = open_checkpoint(stored, GPTConfig)
    if form == "ckpt.pt" and stored.is_bare:
        return stored.path
    if form == "ckpt.pt" and source.tensors is not None:
        # a copy, since nanoGPT's train.py would write through the link, into the checkpoint. It is not read
        # with read_file, which adds arguments of the model that nanoGPT does not know
        return write_ckpt(out_dir, torch.load(stored.path, map_location="cpu", mmap=True))
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    check_weights(source, model)
    materialize(model, torch.device("cpu"))
    model.set_step(stored.step)
    if form == "hf":
        restore_checkpoint(source, model)
        check_finite(model, stored.path)
        vocabulary = vocabulary_of_run(source.run, stored.folder, dataset)
        return write_hf(out_dir, model, vocabulary, model_card(source))
    config, optimizers = source.run["config"], []
    if ":" in config["optimizer"]:  # no file that a checkpoint names is run
        console.print_to_stderr("note: the state of your own optimizer is left out")
    else:
        optimizers = optim.make_optimizers(model, config)
    restore_checkpoint(source, model, optimizers)
    extra = read_extra(source, model)
    return write_ckpt(out_dir, ckpt_file.nanogpt_state(source.run, model, optimizers, extra))


def write_ckpt(folder: str, state: dict) -> Path:
    """Write FOLDER/ckpt.pt, whole or not at all; returns the file."""
    with TemporaryDirectory(prefix=UNFINISHED, dir=folder) as unfinished:
        new = Path(unfinished) / "ckpt.pt"
        ckpt_file.write_file(new, state)
        return new.replace(Path(folder) / "ckpt.pt")


def write_hf(out_dir: str, model: GPT, vocabulary: Vocabulary, card: str) -> Path:
    """
    Write OUT_DIR/hf: weights, configuration, tokenizer and model card. An older folder is renamed to hf_1,
    hf_2, ..., since it may contain other files too. Returns the folder. For errors see huggingface.save.
    """
    c, target = model.config, Path(out_dir) / "hf"
    with TemporaryDirectory(prefix=UNFINISHED, dir=out_dir) as unfinished:
        new = Path(unfinished) / "hf"
        token_ids = tokenizer.save_tokenizer(new, vocabulary, c.vocab_size, c.block_size)
        huggingface.save(new, model, token_ids)
        (new / "README.md").write_text(card, encoding="utf-8")
        for path in new.glob("*.safetensors"):  # their library lets the owner alone read them
            path.chmod((new / "README.md").stat().st_mode)
        if target.exists():
            kept = target.rename(free_name(Path(out_dir), "hf", first=1))
            console.print_to_stderr(f"note: the older {target} is now {kept}")
        return new.rename(target)


def model_card(source: OpenCheckpoint) -> str:
    """
    The README.md of an exported model: what it is, its validation loss, and what the loss was measured on.
    """
    stored = source.stored
    loss, bits = losses_of(stored)
    facts = measures.measures_of(source.run)
    measured_on = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"""---
library_name: transformers
---
# Step {stored.step:,} of a GPT trained with isoGPT

Validation loss: {loss} nats per token, {bits} bits per byte.
Measured on (0 sequences: all of val.bin): {measured_on}.
"""


def losses_of(stored: StoredCheckpoint) -> list[str]:
    """The validation loss and its bits per byte, as they are printed; "-" if they are not known."""
    values = (stored.val_loss, stored.bits_per_byte)
    return ["-" if value is None else f"{value:.4f}" for value in values]


def convert_hf(folder: str) -> Path:
    """
    Write FOLDER/ckpt.pt, step 0 of a run, from the model of transformers in FOLDER; returns the file.

    Raises:
        ValueError: the model cannot be loaded, or FOLDER contains checkpoints.
    """
    if manifest.is_run(folder):
        raise ValueError(f"{folder} contains checkpoints: use a different folder")
    model = GPT.from_pretrained(folder)
    run = {"model_args": model.describe(), "iter_num": 0, "best_val_loss": float("inf"), "config": {}}
    run["isogpt"] = {"vocabulary": vocabulary_of_run(run, folder).describe()}
    return write_ckpt(folder, ckpt_file.nanogpt_state(run, model, []))


def list_checkpoints(out_dir: str) -> str:
    """A table of the checkpoints in a run's folder."""
    out = Path(out_dir)
    lines = [f"{'step':>10}  {'form':8}  {'val loss':>8}  {'bits/byte':>9}  {'GB':>7}  state"]
    folders = manifest.step_folders(out)
    newest = next(filter(None, map(manifest.read_manifest, folders)), {})  # it names the best step
    for folder in folders:
        step = manifest.step_of(folder)
        try:
            if problem := manifest.damage(folder):
                lines.append(f"{step:>10}  damaged: {problem}")
            else:
                note = " (best)" if step == newest.get("best_step") else ""
                lines.append(row(search.open_folder(folder), note))
        except ValueError as e:  # a file cannot be read, and may be intact
            lines.append(f"{step:>10}  {e}")
    if not folders:
        stored, problems = search.find_checkpoint(out_dir)
        lines.append(row(stored) if stored else str(manifest.no_checkpoint(out_dir, problems)))
    return "\n".join(lines)


def row(stored: StoredCheckpoint, note: str = "") -> str:
    """A line of the table."""
    loss, bits = losses_of(stored)
    form = stored.path.name if stored.path.is_file() else "shards"
    size = manifest.size_of(stored.manifest) / 1e9
    return f"{stored.step:>10}  {form:8}  {loss:>8}  {bits:>9}  {size:7.3f}  valid{note}"


def main() -> None:
    """The command line: see the first lines of this file."""
    console.prepare()
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add, either = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("out_dir", help="the run's folder")
    either("--list", action="store_true", help="list the checkpoints (the default)")
    either("--to", choices=["ckpt.pt", "hf"], help="convert the newest checkpoint; hf: the best")
    either("--from", dest="source", choices=["hf"], help="convert a model of transformers")
    add("--dataset", default="", help="with --to=hf: the data set whose vocabulary is written")
    options = parser.parse_args()
    interrupt.raise_interrupt()  # what is unfinished is deleted
    try:
        if options.to:
            result = convert(options.out_dir, options.to, options.dataset)
        elif options.source:
            result = convert_hf(options.out_dir)
        else:
            result = list_checkpoints(options.out_dir)
        console.print_result(str(result))
    except (OSError, ValueError) as e:
        sys.exit(f"error: {console.visible(str(e))}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
