"""OpenWebText in GPT-2's tokens, from the Hugging Face hub: 8 million web pages, each followed by the end-of-text
token. With --data_files= it does the same to documents of your own, and needs no network."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
from bins import prepare_documents, run

FOLDER = Path(__file__).absolute().parent
SOURCE = {"dataset": "Skylion007/openwebtext", "revision": "refs/convert/parquet"}
DOCUMENTS = 8_013_769


def load() -> Any:
    """The data set, downloaded into the hub's cache. The revision is the hub's own conversion to Parquet: the main
    one holds a loading script, which today's `datasets` refuses."""
    from datasets import load_dataset

    return load_dataset(SOURCE["dataset"], revision=SOURCE["revision"], split="train")


def main(argv: list[str]) -> None:
    """Writes the data set beside this file."""
    prepare_documents(FOLDER, __doc__, argv, load, SOURCE, DOCUMENTS)


if __name__ == "__main__":
    sys.exit(run(main))
