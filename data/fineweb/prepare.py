"""FineWeb-Edu's sample of 10 billion tokens, in GPT-2's tokens, streamed from the Hugging Face hub: only the bins take
disk space. With --data_files= it does the same to documents of your own, and needs no network."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
from bins import prepare_documents, run

FOLDER = Path(__file__).absolute().parent
SOURCE = {"dataset": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"}


def load() -> Any:
    """The data set as a stream."""
    from datasets import load_dataset

    return load_dataset(SOURCE["dataset"], name=SOURCE["name"], split="train", streaming=True)


def main(argv: list[str]) -> None:
    """Writes the data set beside this file."""
    prepare_documents(FOLDER, __doc__, argv, load, SOURCE)


if __name__ == "__main__":
    sys.exit(run(main))
