"""Read the documents of --data_files or of the Hugging Face hub, and Tiny Shakespeare."""

import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from isogpt.common.files import parse_json, write_whole
from isogpt.common.packages import needed_by
from isogpt.data.text_files import read_text

SHAKESPEARE = {
    "url": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
BATCH_ROWS = 1000
BLOCK = 1 << 20  # characters of a .txt file, or bytes of a .parquet file, that are read at once


def read_documents(data_files: str, text_key: str = "text", separator: str = "") -> Iterator[str]:
    """
    Yield the documents of a comma-separated list of files, folders and globs, sorted by path. A .txt file is
    one document, or several with a separator, a .jsonl file contains one per line, a .parquet file one per
    row; null is none. All files are streamed, except a .txt file without a separator.

    Raises:
        ValueError: a file does not exist, has a different extension or cannot be parsed.
    """
    for path in find_files(data_files):
        count = 0
        try:
            for text in texts_in(path, text_key, separator):
                count += 1
                if text is not None:
                    yield text
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}, after {count} documents: {error}") from error


def find_files(data_files: str) -> list[Path]:
    """The files of --data_files, see `read_documents`, all of which are checked before the first is read."""
    names = {}  # by the file that they lead to
    # a file's name may contain a comma; a shell replaces ~ only at the start of a word
    patterns = [data_files] if os.path.exists(data_files) else map(str.strip, data_files.split(","))
    for pattern in map(os.path.expanduser, patterns):
        files = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if os.path.isdir(pattern):
            files = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
            files = [name for name in files if name.lower().endswith(KINDS)]
        files = sorted(filter(os.path.isfile, files))
        others = [name for name in files if not name.lower().endswith(KINDS)]
        if others or not files:
            problem = f"{others[0]} cannot be read" if others else f"'{pattern}' matches or contains no file"
            raise ValueError(f"--data_files: {problem}: give files that end in {', '.join(KINDS)}")
        names |= {os.path.realpath(name): name for name in files}
    return [Path(name) for name in sorted(names.values())]


def texts_in(path: Path, text_key: str, separator: str) -> Iterable[str | None]:
    """The documents of a file, None for null. `datasets` would read a text that is a date as a date."""
    name = path.name.lower()
    if name.endswith(".txt"):
        return separated(path, separator) if separator else [read_text(path)]
    if name.endswith(".parquet"):
        return texts_of(rows_of(path, text_key), text_key)
    return texts_of(records_of(path), text_key)


def separated(path: Path, separator: str) -> Iterator[str]:
    """Yield the texts between the separators, without white space at both ends, while the file is read."""
    rest = ""
    with open(path, encoding="utf-8-sig") as file:
        while block := file.read(BLOCK):
            *documents, rest = (rest + block).split(separator)
            yield from map(str.strip, documents)
    yield rest.strip()


def records_of(path: Path) -> Iterator[Any]:
    """Yield the record of each line of a .jsonl or .jsonl.gz file; skip blank lines."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rb") as lines:
        yield from map(parse_json, filter(bytes.strip, lines))


def rows_of(path: Path, text_key: str) -> Iterator[dict]:
    """Yield the rows of a .parquet file, with the column `text_key` alone if there is one."""
    with needed_by("a .parquet file", "pyarrow"):
        import pyarrow.parquet

    # by default, a column of a whole row group would be in memory, which may be as large as the file
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as table:
        columns = [text_key] if text_key in table.schema_arrow.names else None
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            yield from batch.to_pylist()


def texts_of(records: Iterable[Any], text_key: str) -> Iterator[str | None]:
    """Yield record[text_key] of each record. Raises ValueError if it is neither a string nor null."""
    for record in records:
        if not isinstance(record, dict) or not isinstance(record.get(text_key, 0), str | None):
            problem = f"no string at '{text_key}' in {str(record)[:200]}"
            advice = "set --text_key=, or write one text for each record, as 'Chats and instructions' in "
            raise ValueError(f"{problem}; {advice}data/README.md shows")
        text = record[text_key]
        if text:  # JSON can hold halves of surrogate pairs, but neither UTF-8 nor a tokenizer.json
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        yield text


def read_shakespeare(folder: Path) -> tuple[str, dict]:
    """
    Return Tiny Shakespeare and its source: the text of input.txt in `folder`, which is downloaded if it does
    not exist. Raises ValueError if the download fails or has a different SHA-256.
    """
    path, url = folder / "input.txt", SHAKESPEARE["url"]
    if not path.exists():
        print(f"downloading {url}")
        try:
            with urlopen(url, timeout=60) as response:
                data = response.read()
            if hashlib.sha256(data).hexdigest() != SHAKESPEARE["sha256"]:
                raise OSError(f"{len(data):,} bytes that are not the expected text")
        except OSError as error:
            advice = f"put the text at {path}, or use your own with --data_files="
            raise ValueError(f"could not download {url} ({error}); {advice}") from error
        write_whole(path, data)
    return read_text(path), {"file": path.name}


def read_hub(name: str, text_key: str, options: dict) -> Iterator[str]:
    """Yield the documents of a Hugging Face data set; `options` are those of datasets.load_dataset."""
    with needed_by(f"downloading {name}", "datasets"):
        from datasets import load_dataset

    dataset = load_dataset(name, split="train", **options)
    for batch in dataset.iter(batch_size=BATCH_ROWS):  # much faster than row by row
        if text_key not in batch:
            raise ValueError(f"no column '{text_key}' in {list(batch)}; set --text_key=")
        yield from batch[text_key]
