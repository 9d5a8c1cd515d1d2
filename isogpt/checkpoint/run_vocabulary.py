"""The vocabulary of a run's token ids, and whether a data set fits the vocabulary."""

from pathlib import Path

from isogpt.checkpoint.measures import measures_of
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.data import tokenizer, vocabulary
from isogpt.data.dataset import Dataset, find_dataset, read_meta
from isogpt.data.vocabulary import Vocabulary
from isogpt.nn.huggingface import GPT2

FEW_IDS = 1000  # a page of text contains larger ids of GPT-2, and smaller ids of characters


def vocabulary_of_run(run: dict, folder: Path, dataset: str = "") -> Vocabulary:
    """
    Find the vocabulary of a run: what the run's checkpoint records. If there is no record, as in nanoGPT's
    runs, it is in the tokenizer's files next to the checkpoints or in the data set. Otherwise it is GPT-2's
    vocabulary, if the model's size allows this.

    Args:
        run: see source.OpenCheckpoint.run.
        folder: the run's folder.
        dataset: a data set to ask instead; '': none.

    Raises:
        ValueError: a file cannot be read, or `dataset` does not exist or uses more ids than the model.
    """
    size = run["model_args"]["vocab_size"]
    if dataset:
        place = find_dataset(dataset)
        found = vocabulary.resolve(vocabulary.of_data(read_meta(place), place), size, str(place))
        vocabulary.check_size(found.size, size)
        return found
    if found := vocabulary.recorded(run) or vocabulary.of_folder(folder):
        return found
    if not (name := run["config"].get("dataset", "")):
        return vocabulary.resolve(None, size, "the checkpoint")
    try:
        place = find_dataset(name)
    except ValueError:
        return vocabulary.resolve(None, size, f"the checkpoint, whose data set {name} is not here,")
    meta = read_meta(place)
    found = vocabulary.of_data(meta, place)
    is_table = found is not None and found.kind in ("table", "bytes")
    if is_table and size not in (found.size, vocabulary.vocab_size_of(meta)):
        return Vocabulary(
            "unknown",
            f"data set {name} uses {found.size} ids, but the run's model {size}: the data set "
            "was prepared again since",
        )
    return vocabulary.resolve(found, size, str(place))


def vocabulary_of_weights(name: str, vocab_size: int) -> Vocabulary:
    """
    Find the vocabulary of pretrained weights: GPT-2's, or that of the tokenizer in a folder of transformers.

    Raises:
        ValueError: a file cannot be read.
    """
    if name in GPT2:
        return Vocabulary("tiktoken", "gpt2")
    found = vocabulary.of_folder(name) or vocabulary.of_other_files(name)
    return vocabulary.resolve(found, vocab_size, f"{name}, without a tokenizer.json,")


def vocabulary_for_run(
    data: Dataset, source: OpenCheckpoint | None, weights: str, vocab_size: int, is_resume: bool
) -> tuple[Vocabulary, list[str]]:
    """
    Find the vocabulary of a training run, which the run's checkpoints record. It is the data set's
    vocabulary, or else the vocabulary with which the run's first weights were trained.

    Args:
        source: the checkpoint that the run starts from.
        weights: where the weights are: the run's folder or ckpt.pt, or the value of init_from.
        vocab_size: the model's number of ids.

    Returns:
        (the vocabulary, notes for the user)

    Raises:
        ValueError: the run is resumed, but the ids of the data now mean something different; or the data set
            uses more ids than the model.
    """
    if data.vocabulary:
        vocabulary.check_size(data.vocabulary.size, vocab_size)
    before = None
    if source:
        place = Path(weights)
        before = vocabulary_of_run(source.run, place.parent if place.is_file() else place)
    elif weights not in ("scratch", "auto", "resume"):
        before = vocabulary_of_weights(weights, vocab_size)
    now = data.vocabulary or before or vocabulary.resolve(None, vocab_size, str(data.folder))
    changed = tokenizer.difference(before, now) if before else ""
    if is_resume and before.kind == "unknown" and now.size not in (None, vocab_size):
        changed = before.content
    notes = []
    if changed:
        notes.append(
            f"the token ids of {data.folder} do not mean what they meant to the checkpoint: {changed}"
        )
    if changed and is_resume:
        again = f"prepare the data set with the vocabulary of the run, --tokenizer={weights}"
        new = f"start a new run from the weights, with --init_from={weights} and a new --out_dir"
        raise ValueError(f"{notes[0]}: {again}; or {new}")
    elif before and (now.size or 0) < (before.size or 0):
        now = before  # text that was prepared again may contain only the first of the run's tokens
    is_taken_for_gpt2 = not data.vocabulary and now.kind == "tiktoken" and not is_resume
    if is_taken_for_gpt2 and data.highest < FEW_IDS:
        notes.append(
            f"{data.folder} does not say what the token ids mean: they are taken for GPT-2's, although the "
            f"highest id is {data.highest}. If they are different, copy the meta.pkl of prepare.py there, or "
            f"set --vocab_size={data.highest + 1}"
        )
    if is_resume and measures_of(source.run).get("digest") not in (None, data.digest):
        notes.append(f"the tokens of {data.folder} have changed since the checkpoint was written")
    return now, notes
