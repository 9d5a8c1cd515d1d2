"""The vocabulary of a run's token ids, and whether a data set fits the vocabulary."""

from pathlib import Path

from isogpt.checkpoint.measures import measures_of
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.data import tokenizer
from isogpt.data.data_folder import read_metadata
from isogpt.data.dataset import Dataset, common_vocabulary
from isogpt.data.mixture import find_sources
from isogpt.data.vocabulary import Vocabulary, check_size, gpt2_or_unknown, recorded, tokenizer_in
from isogpt.nn.huggingface import GPT2


def vocabulary_of_run(run: dict, folder: Path, dataset: str = "") -> Vocabulary:
    """
    Find the vocabulary of a run: that of `dataset`, if one is named, or what the run's checkpoint records.
    nanoGPT's runs record none: then it is the tokenizer.json next to the checkpoints, or that of the data set
    that the run's settings name, or GPT-2's.

    Args:
        run: see source.OpenCheckpoint.run.
        folder: the run's folder.

    Raises:
        ValueError: a file cannot be read, the data set that is named does not exist, or the model has fewer
            ids than the vocabulary.
    """
    if not dataset and (vocabulary := recorded(run) or tokenizer_in(folder)):
        return vocabulary
    vocab_size, name = run["model_args"]["vocab_size"], dataset or run["config"].get("dataset", "")
    try:
        metas = [read_metadata(folder) for folder, _ in find_sources(name)]
    except ValueError:
        if dataset:
            raise
        return gpt2_or_unknown(vocab_size, f"the checkpoint, whose data set {name} is not here,")
    vocabulary = common_vocabulary(metas) or gpt2_or_unknown(vocab_size, name)
    sizes = [vocabulary.size, *(meta.vocab_size for meta in metas)]
    if not dataset and vocabulary.characters and vocab_size not in sizes:
        problem = f"data set {name} uses {vocabulary.size} ids, but the run's model {vocab_size}"
        return Vocabulary("unknown", f"{problem}: the data set has been prepared again since then")
    check_size(vocabulary.size, vocab_size)
    return vocabulary


def vocabulary_of_weights(name: str, vocab_size: int) -> Vocabulary:
    """
    Find the vocabulary of pretrained weights: GPT-2's, or that of the tokenizer in a folder of transformers.

    Raises:
        ValueError: a file cannot be read.
    """
    vocabulary = None if name in GPT2 else tokenizer_in(name)
    return vocabulary or gpt2_or_unknown(vocab_size, f"{name}, without a tokenizer.json,")


def vocabulary_for_run(
    data: Dataset, source: OpenCheckpoint | None, weights: str, vocab_size: int, is_resume: bool
) -> tuple[Vocabulary, list[str]]:
    """
    Find the vocabulary of a training run, which the run's checkpoints record. It is the data set's
    vocabulary, or else the one with which the run's first weights were trained.

    Args:
        source: the checkpoint that the run starts from.
        weights: where the weights are: the run's folder or ckpt.pt, or the value of init_from.
        vocab_size: the model's number of ids.

    Returns:
        (the vocabulary, notes for the user)

    Raises:
        ValueError: the run is resumed, but the ids of the data now mean something different; or the data set
            uses more ids than the model; or a further validation set does not fit, see `check_eval_dataset`.
    """
    before, place = None, Path(weights)
    if source:
        before = vocabulary_of_run(source.run, place.parent if place.is_file() else place)
    elif weights not in ("scratch", "auto", "resume"):
        before = vocabulary_of_weights(weights, vocab_size)
    now = data.vocabulary or before or gpt2_or_unknown(vocab_size, str(data.folder))
    check_size(now.size, vocab_size)
    notes, changed = [], before and tokenizer.difference(before, now)
    if is_resume and before.kind == "unknown" and now.size not in (None, vocab_size):
        changed = before.content
    if changed:
        problem = f"the token ids of {data.folder} do not mean what they mean in the checkpoint: {changed}"
        if is_resume:
            again = f"prepare the data set with the vocabulary of the run, --tokenizer={weights}"
            new = f"start a new run from the weights, with --init_from={weights} and a new --out_dir"
            raise ValueError(f"{problem}: {again}; or {new}")
        notes.append(problem)
    elif before and (now.size or 0) < (before.size or 0):
        now = before  # text that was prepared again may contain only the first of the run's tokens
    of_mixture = data.parts or (source and "sources" in source.run["isogpt"])
    # what changed in a mixture, or from or to one, see start.change_of_sources
    if is_resume and not of_mixture and measures_of(source.run).get("digest") not in (None, data.digest):
        notes.append(f"the tokens of {data.folder} have changed since the checkpoint was written")
    for one in data.further:
        check_eval_dataset(one, now, vocab_size)
    return now, notes


def check_eval_dataset(one: Dataset, vocabulary: Vocabulary, vocab_size: int) -> None:
    """
    Raise ValueError if the token ids of a further validation set do not mean what those of the run mean, as
    far as both are known, or do not fit its model with vocab_size ids.
    """
    problem = one.vocabulary and tokenizer.difference(vocabulary, one.vocabulary)
    if not problem and one.highest >= vocab_size:
        problem = f"it contains token id {one.highest}, but the model's vocabulary size is {vocab_size}"
    if problem:
        raise ValueError(
            f"eval_datasets: the token ids of {one.folder} are not those of the run: {problem}. Prepare it "
            f"with the run's tokenizer, or leave {one.name} out of --eval_datasets="
        )
