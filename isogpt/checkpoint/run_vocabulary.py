"""The vocabulary of a run's token ids, and whether a data set fits the vocabulary."""

from pathlib import Path

from isogpt.checkpoint.measures import measures_of
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.data import tokenizer
from isogpt.data.data_folder import read_metadata
from isogpt.data.dataset import Dataset, common_vocabulary, find_sources
from isogpt.data.vocabulary import (
    Vocabulary,
    check_size,
    gpt2_or_unknown,
    recorded,
    tokenizer_in,
    unread_tokenizer,
)
from isogpt.nn.huggingface import GPT2

FEW_IDS = 1000  # a page of text contains larger ids if they are GPT-2's, and only smaller ones of characters


def vocabulary_of_run(run: dict, folder: Path, dataset: str = "") -> Vocabulary:
    """
    Find the vocabulary of a run, in order of precedence: what `dataset` says, what the run's checkpoint
    records, the tokenizer.json next to the checkpoints. nanoGPT's runs have none of these: then it is the
    vocabulary of the data set that the run's settings name.

    Args:
        run: see source.OpenCheckpoint.run.
        folder: the run's folder.
        dataset: a data set to ask instead; '': none.

    Raises:
        ValueError: a file cannot be read, or `dataset` does not exist or uses more ids than the model.
    """
    if dataset:
        return vocabulary_of_dataset(dataset, run["model_args"]["vocab_size"])
    return (
        recorded(run) or tokenizer_in(folder) or unread_tokenizer(folder) or vocabulary_of_training_data(run)
    )


def vocabulary_of_dataset(dataset: str, vocab_size: int) -> Vocabulary:
    """
    Find the vocabulary of the data set or mixture that a user names, or GPT-2's, for a model with vocab_size
    ids. Raises ValueError if the data set does not exist or uses more ids than the model.
    """
    metas = [read_metadata(folder) for folder in find_sources(dataset)]
    vocabulary = common_vocabulary(metas) or gpt2_or_unknown(vocab_size, str(metas[0].folder))
    check_size(vocabulary.size, vocab_size)
    return vocabulary


def vocabulary_of_training_data(run: dict) -> Vocabulary:
    """
    Find the vocabulary of the data set that a run was trained on, if it is still the same, or GPT-2's. Raises
    ValueError if a file cannot be read.
    """
    vocab_size, name = run["model_args"]["vocab_size"], run["config"].get("dataset", "")
    if not name:
        return gpt2_or_unknown(vocab_size, "the checkpoint")
    try:
        folders = find_sources(name)
    except ValueError:
        return gpt2_or_unknown(vocab_size, f"the checkpoint, whose data set {name} is not here,")
    metas = [read_metadata(folder) for folder in folders]
    vocabulary = common_vocabulary(metas)
    if not vocabulary:
        return gpt2_or_unknown(vocab_size, " and ".join(map(str, folders)))
    sizes = [vocabulary.size, *(meta.vocab_size for meta in metas)]
    if vocabulary.kind == "table" and vocab_size not in sizes:
        problem = f"data set {name} uses {vocabulary.size} ids, but the run's model {vocab_size}"
        return Vocabulary("unknown", f"{problem}: the data set has been prepared again since then")
    return vocabulary


def vocabulary_of_weights(name: str, vocab_size: int) -> Vocabulary:
    """
    Find the vocabulary of pretrained weights: GPT-2's, or that of the tokenizer in a folder of transformers.

    Raises:
        ValueError: a file cannot be read.
    """
    if name in GPT2:
        return Vocabulary("tiktoken", "gpt2")
    vocabulary = tokenizer_in(name) or unread_tokenizer(name)
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
    if data.vocabulary:
        check_size(data.vocabulary.size, vocab_size)
    before = vocabulary_of_start(source, weights, vocab_size)
    now = data.vocabulary or before or gpt2_or_unknown(vocab_size, str(data.folder))
    notes = []
    if changed := change_of_meaning(before, now, vocab_size, is_resume):
        problem = f"the token ids of {data.folder} do not mean what they mean in the checkpoint: {changed}"
        if is_resume:
            again = f"prepare the data set with the vocabulary of the run, --tokenizer={weights}"
            new = f"start a new run from the weights, with --init_from={weights} and a new --out_dir"
            raise ValueError(f"{problem}: {again}; or {new}")
        notes.append(problem)
    elif before and (now.size or 0) < (before.size or 0):
        now = before  # text that was prepared again may contain only the first of the run's tokens
    is_taken_for_gpt2 = not data.vocabulary and now.kind == "tiktoken" and not is_resume
    if is_taken_for_gpt2 and data.highest < FEW_IDS:
        notes.append(
            f"{data.folder} does not say what the token ids mean: they are taken for GPT-2's, although the "
            f"highest id is {data.highest}. If they are different, copy the meta.pkl of prepare.py there, or "
            f"set --vocab_size={data.highest + 1}"
        )
    of_mixture = data.is_mixture or (source and "sources" in source.run["isogpt"])
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


def vocabulary_of_start(source: OpenCheckpoint | None, weights: str, vocab_size: int) -> Vocabulary | None:
    """The vocabulary with which a run's first weights were trained; None for initial weights."""
    if source:
        place = Path(weights)
        return vocabulary_of_run(source.run, place.parent if place.is_file() else place)
    if weights in ("scratch", "auto", "resume"):
        return None
    return vocabulary_of_weights(weights, vocab_size)


def change_of_meaning(before: Vocabulary | None, now: Vocabulary, vocab_size: int, is_resume: bool) -> str:
    """
    What differs between the vocabulary of a run's first weights and that of the data; '' if nothing is known
    to differ.
    """
    if not before:
        return ""
    if is_resume and before.kind == "unknown" and now.size not in (None, vocab_size):
        return before.content
    return tokenizer.difference(before, now)
