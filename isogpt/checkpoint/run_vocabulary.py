"""The vocabulary of a run's token ids, and whether a data set fits the vocabulary."""

from pathlib import Path

from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.data import tokenizer
from isogpt.data.data_folder import find_dataset, vocabulary_in
from isogpt.data.dataset import Dataset
from isogpt.data.vocabulary import OTHER_IDS, Vocabulary, check_size, gpt2_or_unknown, recorded, tokenizer_in


def vocabulary_of_run(run: dict, folder: Path | str, dataset: str = "") -> Vocabulary:
    """
    Find the vocabulary of a run: that of `dataset`, if one is named, or what the run's checkpoint records.
    nanoGPT's runs record none: then it is the tokenizer.json next to the weights, or that of the data set
    that the run's settings name, or GPT-2's.

    Args:
        run: see source.OpenCheckpoint.run; of weights without a run, model_args alone.
        folder: where the weights are, or their name.

    Raises:
        ValueError: a file cannot be read, the data set that is named does not exist, or the model has fewer
            ids than the vocabulary.
    """
    vocabulary = find_vocabulary(run, folder, dataset)
    check_size(vocabulary, run["model_args"]["vocab_size"])
    return vocabulary


def find_vocabulary(run: dict, folder: Path | str, dataset: str = "") -> Vocabulary:
    """`vocabulary_of_run` without a comparison with the number of the model's ids."""
    vocabulary, name = None, dataset
    if not dataset:
        vocabulary = recorded(run) or tokenizer_in(folder)
        name = run.get("config", {}).get("dataset", "")
    if name and not vocabulary:
        try:
            vocabulary = vocabulary_in(find_dataset(name))
        except ValueError:
            if dataset:
                raise
    return vocabulary or gpt2_or_unknown(run["model_args"]["vocab_size"], name or folder)


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
            uses more ids than the model; or a part of a mixture or a further validation set does not fit.
    """
    before, notes = None, []
    if source:
        before = find_vocabulary(source.run, source.stored.folder)
    elif weights not in ("scratch", "auto", "resume"):
        before = find_vocabulary({"model_args": {"vocab_size": vocab_size}}, weights)
    now = data.vocabulary or before or gpt2_or_unknown(vocab_size, data.folder)
    advice = OTHER_IDS if source else "set --vocab_size={ids}, which adds {tokens} to the model"
    check_size(now, vocab_size, data.highest + 1, advice)
    if changed := before and tokenizer.difference(before, now):
        what = "do not mean what they mean in the checkpoint"
        problem = f"the token ids of {data.folder} {what}: {changed}"
        if is_resume:
            advice = f"prepare it with --tokenizer={weights}, or start a new run"
            raise ValueError(f"{problem}: {advice}")
        notes.append(problem)
    elif before and before.size <= vocab_size and (now.kind == "unknown" or now.size < before.size):
        now = before  # text that was prepared again may contain only the first of the run's tokens
    for one in data.named:
        problem = ""
        if one.highest >= vocab_size:
            problem = f"id {one.highest} is beyond the model's {vocab_size} ids"
        elif one.vocabulary:
            problem = tokenizer.difference(now, one.vocabulary)
        if problem:
            where = f"the token ids of {one.folder} are not those of the run"
            raise ValueError(f"{where}: {problem}. Prepare it with the run's tokenizer")
    return now, notes
