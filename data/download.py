"""Read texts that are downloaded: Tiny Shakespeare, and data sets of the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from read_files import BATCH_ROWS, Document

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

    count = 0
    try:
        rows = load_dataset(name, split="train", streaming=True, **options)
        for batch in rows.iter(batch_size=BATCH_ROWS):
            if text_key not in batch:
                raise ValueError(f"no column '{text_key}' in {list(batch)}: set --text_key=")
            for text in batch[text_key]:
                count += 1
                if text:
                    yield f"{name}, document {count}", text
    except Exception as error:  # the libraries that stream it raise nearly anything
        raise ValueError(f"{name}, document {count + 1}: {error}") from error
