"""Read texts that are downloaded: Tiny Shakespeare, and data sets of the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from read_files import BATCH_ROWS, Document, check_column, documents_of

from isogpt.common.files import write_whole
from isogpt.common.packages import needed_by
from isogpt.data.text_files import read_text

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def read_shakespeare(folder: Path) -> tuple[str, dict]:
    """
    Return Tiny Shakespeare and its source: the text of input.txt in `folder`, which is downloaded if it does
    not exist.
    """
    path = folder / "input.txt"
    if not path.exists():
        print(f"downloading {SHAKESPEARE}; without a network, put the text at {path}")
        with urlopen(SHAKESPEARE, timeout=60) as response:
            write_whole(path, response.read())
    return read_text(path), {"file": path.name}


def read_hub(name: str, text_key: str, options: dict) -> Iterator[Document]:
    """Stream the documents of a data set of Hugging Face's datasets; `options` are those of load_dataset."""
    with needed_by(f"reading {name}", "datasets"):
        from datasets import load_dataset

    def texts() -> Iterator[str | None]:
        for batch in load_dataset(name, split="train", streaming=True, **options).iter(BATCH_ROWS):
            check_column(text_key, batch)
            yield from (text or None for text in batch[text_key])  # nor is an empty text a document

    yield from documents_of(name, texts(), text_key)
