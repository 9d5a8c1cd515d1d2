"""
List a run's checkpoints, or convert the newest checkpoint. Neither needs the devices of the run.

    python export.py OUT_DIR --list          step, form, losses, size and state of each checkpoint
    python export.py OUT_DIR --to=ckpt.pt    one file in nanoGPT's form: OUT_DIR/ckpt.pt
    python export.py OUT_DIR --to=hf         the best one, for transformers, with a tokenizer: OUT_DIR/hf
    python export.py FOLDER --from=hf        FOLDER/ckpt.pt from a model of transformers in FOLDER
"""

import argparse
import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from isogpt.checkpoint import manifest, search
from isogpt.checkpoint.ckpt_file import nanogpt_state, write_file
from isogpt.checkpoint.measures import WHOLE, measures_of
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run, vocabulary_of_weights
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.checkpoint.source import OpenCheckpoint, check_finite, check_weights, open_checkpoint
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.common import console
from isogpt.common.files import free_name
from isogpt.data import tokenizer
from isogpt.data.vocabulary import Vocabulary
from isogpt.nn import huggingface
from isogpt.parallel.local_parts import local_part_of
from isogpt.parallel.parallelize import materialize
from isogpt.training import optim
from model import GPT, GPTConfig

# a folder to write in, whose name is not one of a run's: no run that is live or starts touches it
UNFINISHED = "unfinished_export_"
CARD_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
---
# A GPT trained with isoGPT
"""


def convert(out_dir: str, form: str, dataset: str = "") -> Path:
    """
    Write the newest valid checkpoint of a run as 'ckpt.pt', or the best checkpoint as 'hf', since sample.py
    also uses the best. Returns what was written.

    Args:
        dataset: for 'hf', the data set whose vocabulary is written; '': the vocabulary that the checkpoint
            records.

    Raises:
        ValueError: there is no checkpoint, ids cannot be decoded, or, for 'hf', weights are not finite or
            transformers computes something else.
    """
    stored, damaged = search.find_checkpoint(out_dir, best=form == "hf")
    if not stored:
        problems = damaged or [search.advice_on_folder(out_dir)]
        raise ValueError(f"no valid checkpoint in {out_dir}: {'; '.join(problems)}")
    for report in damaged:
        console.print_to_stderr(f"warning: {console.visible(report)}")
    source = open_checkpoint(stored)
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    check_weights(source, model)
    materialize(model, torch.device("cpu"))
    if form == "hf":
        restore_checkpoint(source, model)
        check_finite(model, stored.path)
        vocabulary = vocabulary_of_run(source.run, Path(out_dir), dataset)
        return write_hf(out_dir, model, vocabulary, model_card(source, model))
    with TemporaryDirectory(prefix=UNFINISHED, dir=out_dir) as unfinished:
        new = Path(unfinished) / "ckpt.pt"
        if source.tensors is None:  # in shards
            write_file(new, state_of_shards(source, model))
        else:
            shutil.copyfile(stored.path, new)
        return new.replace(Path(out_dir) / "ckpt.pt")


def state_of_shards(source: OpenCheckpoint, model: GPT) -> dict:
    """Read a checkpoint in shards into the model; returns the state in nanoGPT's form."""
    config = source.run["config"]
    if ":" not in config["optimizer"]:
        optimizers = optim.make_optimizers(model, config)
        restore_checkpoint(source, model, optimizers)
        return nanogpt_state(source.run, model, optimizers)
    # what a user's class has saved is read as it is: no file that a checkpoint names is run
    restore_checkpoint(source, model)
    kept, parts = defaultdict(dict), {}
    for name, shape in source.shapes.items():
        if name.startswith("optim."):
            parameter, _, key = name.removeprefix("optim.").rpartition(".")
            kept[parameter][key] = torch.empty(shape, dtype=torch.float32 if shape else torch.float64)
            parts[name] = local_part_of(kept[parameter][key])
    source.read(parts)
    return nanogpt_state(source.run, model, []) | {"optimizer": {"state": dict(kept)}}


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
        if target.exists():
            kept = target.rename(free_name(Path(out_dir), "hf", first=1))
            console.print_to_stderr(f"note: the older {target} is now {kept}")
        return new.rename(target)


def model_card(source: OpenCheckpoint, model: GPT) -> str:
    """
    The README.md of an exported model: what it is, its validation loss, and what the loss was measured on.
    """
    stored, ours = source.stored, source.run["isogpt"]
    loss, bits, tokens = stored.val_loss, stored.bits_per_byte, ours.get("tokens")
    measures = stored.manifest.get("measures") or measures_of(source.run)
    dataset, digest = Path(str(measures.get("dataset") or "")).name, measures.get("digest")
    if sources := ours.get("sources"):
        dataset = ",".join(f"{name}:{one['of_1000']}" for name, one in sources.items())
    sequences = measures.get("sequences")
    measured_on = sequences and f"{console.count_text(sequences, 'sequence')} of val.bin"
    facts = {
        "parameters": f"{model.get_num_params():,}",
        "training steps": f"{stored.step:,}" + (f", {tokens:,} tokens" if tokens else ""),
        "validation loss": "" if loss is None else f"{loss:.4f} nats per token",
        "bits per byte": "" if bits is None else f"{bits:.4f}",
        "data set": f"{dataset}, digest {digest}" if digest else dataset,
        "measured on": "all of val.bin" if sequences == WHOLE else measured_on,
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
    if manifest.is_run(folder):
        raise ValueError(f"{folder} contains checkpoints, which a new one would hide: use a different folder")
    model = GPT.from_pretrained(folder)
    vocabulary = vocabulary_of_weights(folder, model.config.vocab_size)
    run = {"model_args": model.describe(), "iter_num": 0, "best_val_loss": float("inf"), "config": {}}
    run["isogpt"] = {"vocabulary": vocabulary.describe()}
    with TemporaryDirectory(prefix=UNFINISHED, dir=folder) as unfinished:
        new = Path(unfinished) / "ckpt.pt"
        write_file(new, nanogpt_state(run, model, []))
        return new.replace(Path(folder) / "ckpt.pt")


def list_checkpoints(out_dir: str) -> str:
    """A table of the checkpoints in a run's folder."""
    out = Path(out_dir)
    lines = [f"{'step':>10}  {'form':8}  {'val loss':>8}  {'bits/byte':>9}  {'GB':>7}  state"]
    folders = manifest.step_folders(out)
    newest = next(filter(None, map(manifest.read_manifest, folders)), None)  # it names the best step
    best = search.best_folder(out, newest) if newest else None
    for folder in folders:
        content = manifest.read_manifest(folder)
        try:
            state = manifest.damage(folder) or "valid"
        except ValueError as e:  # it may be intact
            state = str(e)
        stored = StoredCheckpoint(folder, manifest.step_of(folder), content, content.get("val_loss"))
        form = "ckpt.pt" if (folder / "ckpt.pt").exists() else "shards"
        lines.append(row(stored, form, f"{state} (best)" if folder == best else state))
    if not folders:
        stored, problems = search.find_checkpoint(out_dir)
        of_bare = [row(stored, "bare", f"valid: {stored.path}")] if stored else problems
        lines += of_bare or [search.advice_on_folder(out_dir)]
    return "\n".join(lines)


def row(stored: StoredCheckpoint, form: str, state: str) -> str:
    """A line of the table."""
    values = (stored.val_loss, stored.bits_per_byte)
    loss, bits = ("-" if value is None else f"{value:.4f}" for value in values)
    size = manifest.size_of({"files": {}} | stored.manifest) / 1e9
    return f"{stored.step:>10}  {form:8}  {loss:>8}  {bits:>9}  {size:7.3f}  {state}"


def main() -> None:
    """The command line: see the first lines of this file."""
    console.prepare()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", help="the run's folder")
    parser.add_argument("--list", action="store_true", help="list the checkpoints (the default)")
    parser.add_argument("--to", choices=["ckpt.pt", "hf"], help="convert the newest checkpoint; hf: the best")
    parser.add_argument("--from", dest="source", choices=["hf"], help="convert a model of transformers")
    help_text = "with --to=hf: the data set whose vocabulary is written"
    parser.add_argument("--dataset", default="", type=os.path.expanduser, help=help_text)
    options = parser.parse_args()
    try:
        if not Path(options.out_dir).is_dir():
            raise ValueError(f"{options.out_dir} is not a folder: give the run's folder")
        if options.to:
            console.print_result(f"wrote {convert(options.out_dir, options.to, options.dataset)}")
        if options.source:
            console.print_result(f"wrote {convert_hf(options.out_dir)}")
        if options.list or not (options.to or options.source):
            console.print_result(list_checkpoints(options.out_dir))
    except (OSError, ValueError) as e:
        sys.exit(f"error: {console.visible(str(e))}")


if __name__ == "__main__":
    main()
