"""How to see what a trained model writes."""

import shlex

from isogpt.checkpoint.manifest import is_run
from isogpt.data.vocabulary import Vocabulary

STARTS = {"stdlib_char": "def main("}  # prompts that suit a data set of this repository, by name


def how_to_sample(out_dir: str, dataset: str, vocabulary: Vocabulary) -> str:
    """The command that prints samples of a run's model; "" without a checkpoint or a vocabulary."""
    if not is_run(out_dir) or vocabulary.kind == "unknown":
        return ""
    start = f" --start={shlex.quote(STARTS[dataset])}" if dataset in STARTS else ""
    return f"try: python sample.py --out_dir={shlex.quote(out_dir)}{start}"
