"""What every prepare.py shares: reads documents, tokenizes them, writes train.bin, val.bin and their metadata.

A bin is a headerless array of token ids, uint16 or uint32 in the byte order of this machine; meta.json says which.
"""

import argparse
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.request import urlopen

import numpy as np

if TYPE_CHECKING:
    import tiktoken

OPTIONS: dict[str, tuple[type, str]] = {
    "data_files": (
        str,
        "your own .txt, .jsonl and .parquet files instead: comma-separated, globs allowed, read sorted",
    ),
    "text_key": (str, "the key (.jsonl) or column (.parquet) that holds a document's text"),
    "tokenizer": (str, "name of a tiktoken encoding"),
    "val_fraction": (float, "the part of the data that goes to val.bin"),
    "seed": (int, "decides which documents go to val.bin"),
    "num_proc": (int, "processes that tokenize; changes the speed, never the result"),
}
SHAKESPEARE = {
    "url": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
VOCAB_MULTIPLE = 64  # matrix kernels are faster when the vocabulary's dimension divides evenly: 50257 becomes 50304
CHUNK_CHARACTERS = 1 << 20  # enough work to hide what it costs to send text to another process
PARQUET_ROWS = 1000


# ----- command line


def parse_arguments(description: str, argv: list[str], **defaults: Any) -> argparse.Namespace:
    """Reads the options of OPTIONS named in `defaults`, which also gives their default values; anything else in
    `argv` raises ValueError."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    for name, default in defaults.items():
        kind, meaning = OPTIONS[name]
        parser.add_argument(f"--{name}", type=kind, default=default, help=meaning)

    def fail(message: str) -> None:  # argparse would print its usage and exit with status 2
        raise ValueError(f"{message}; possible: {' '.join(f'--{name}=' for name in defaults)} (explained by --help)")

    parser.error = fail
    return parser.parse_args(argv)


def run(main: Callable[[list[str]], None]) -> int:
    """Calls main(arguments) and returns the exit status: what a user can mend becomes one line on stderr and 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception, so that it cleans up
    try:
        main(sys.argv[1:])
        return 0
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing: pip install {error.name}"
    except (ValueError, OSError) as error:
        message = str(error) or type(error).__name__
    except KeyboardInterrupt:
        print("interrupted; the files of an earlier prepare are unchanged", file=sys.stderr)
        return 128 + signal.SIGINT
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 1


def report(folder: Path, meta: dict[str, Any]) -> None:
    """Prints in three lines what a write_ function wrote into `folder`."""
    print(
        f"{folder}: train.bin {meta['train_tokens']:,} tokens, val.bin {meta['val_tokens']:,} tokens, {meta['dtype']}"
    )
    print(f"tokenizer {meta['tokenizer']}: {meta['tokenizer_size']:,} ids, vocab_size {meta['vocab_size']:,}")
    print(f"now: python train.py --dataset={folder.name}")


# ----- reading


def read_documents(data_files: str, text_key: str = "text") -> Iterator[str]:
    """Yields the documents of local files, in sorted order of the files: a .txt is one document, a .jsonl has one in
    each line (blank lines skipped), a .parquet one in each row; .jsonl and .parquet are streamed.

    Raises ValueError at once for a missing file or an unknown extension, and while reading for what is not such text.
    """
    readers = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}
    paths = find_files(data_files)
    for path in paths:
        if path.suffix.lower() not in readers:
            raise ValueError(f"{path}: unknown extension '{path.suffix}'; possible: {' '.join(readers)}")
    return itertools.chain.from_iterable(readers[path.suffix.lower()](path, text_key) for path in paths)


def find_files(data_files: str) -> list[Path]:
    """The files of a comma-separated list of paths and globs, sorted, each once. ValueError if one is missing."""
    found: set[str] = set()
    for pattern in filter(None, data_files.split(",")):
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = [match for match in matches if os.path.isfile(match)]
        if not files:
            what = "is a folder, give the files in it" if matches else "does not exist"
            raise ValueError(f"--data_files: {pattern} {what}, e.g. --data_files='texts/*.txt,more.jsonl'")
        found.update(files)
    if not found:
        raise ValueError(f"--data_files={data_files} names no file, e.g. --data_files='texts/*.txt,more.jsonl'")
    return [Path(name) for name in sorted(found)]


def read_utf8(path: Path) -> str:
    """The text of a UTF-8 file, every line ending as '\\n', no byte order mark. ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start:,}; convert it: iconv -f latin1 -t utf-8") from error


def read_txt(path: Path, text_key: str) -> Iterator[str]:
    """Yields the file's text as one document (`text_key` is for the other formats)."""
    yield read_utf8(path)


def read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    """Yields the value of `text_key` of each line. ValueError names the file and line of what is broken."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # broken JSON, or bytes that are not UTF-8
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f'{path}:{number}: not an object such as {{"{text_key}": "..."}}')
            if text_key not in record:
                raise ValueError(f"{path}:{number}: no key '{text_key}' {other_names(list(record))}")
            yield checked_text(record[text_key], f"{path}:{number}: key '{text_key}'")


def read_parquet(path: Path, text_key: str) -> Iterator[str]:
    """Yields the rows of the column `text_key`. ValueError if there is no such column of strings."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise ValueError(f"{path}: no column '{text_key}' {other_names(names)}")
            rows = itertools.count(1)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    yield checked_text(value, f"{path}, row {next(rows)}: column '{text_key}'")
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not readable as Parquet ({error})") from error


def other_names(names: list[str]) -> str:
    """The end of a message about a missing key or column: what there is, and how to name it."""
    return f"(there is: {', '.join(names[:10]) or 'nothing'}); name the one that holds the text with --text_key="


def checked_text(value: Any, where: str) -> str:
    """`value`, or ValueError if it is not a string."""
    if not isinstance(value, str):
        raise ValueError(f"{where} holds {type(value).__name__} instead of text")
    return value


def read_as_one_text(data_files: str, text_key: str = "text") -> str:
    """All documents of local files as one text, a newline between two; a single .txt comes out as it is."""
    return "\n".join(read_documents(data_files, text_key))


def fetch_text(path: Path, url: str, sha256: str) -> str:
    """The text of `path`, which is first downloaded from `url` if it is not there. ValueError if that fails, or
    brings something whose SHA-256 is not `sha256`."""
    if not path.exists():
        print(f"downloading {url}")
        advice = f"put the text at {path}, or name your own with --data_files="
        try:
            with urlopen(url, timeout=60) as response:
                data = response.read()
        except (OSError, HTTPException) as error:
            raise ValueError(f"could not download {url} ({error}); {advice}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{url} brought {len(data):,} bytes that are not the expected text; {advice}")
        with atomic_files(path.parent, path.name) as files:
            files[path.name].write(data)
    return read_utf8(path)


def hub_documents(load: Callable[[], Any], text_key: str = "text") -> tuple[Iterator[str], int | None]:
    """The column `text_key` of the Hugging Face data set that load() returns, and its number of rows if known.
    Whatever the hub raises, at the start or in the middle of a stream, becomes a ValueError."""

    def reachable(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except ModuleNotFoundError:
            raise
        except Exception as error:  # network, hub, datasets, fsspec and pyarrow each raise their own
            reason = f"{type(error).__name__}: {error}"[:300]
            raise ValueError(
                f"could not load the data set from the Hugging Face hub ({reason}); where the hub is out of reach, "
                "copy its .parquet files here and name them: --data_files='*.parquet'"
            ) from error

    dataset = reachable(load)

    def documents() -> Iterator[str]:
        batches = iter(dataset.iter(batch_size=PARQUET_ROWS))  # a batch at a time is much faster than a row
        while (batch := reachable(lambda: next(batches, None))) is not None:
            if text_key not in batch:
                raise ValueError(f"the hub's data set has no column '{text_key}' {other_names(list(batch))}")
            yield from batch[text_key]

    return documents(), len(dataset) if hasattr(dataset, "__len__") else None


# ----- writing


@contextmanager
def atomic_files(folder: Path, *names: str) -> Iterator[dict[str, BinaryIO]]:
    """Opens new files to write, by name. Leaving the block without an exception puts them in place in the order of
    `names`, each whole and on the disk; an exception leaves `folder` as it was."""
    leftovers = sorted(path.name for path in folder.glob("*.tmp"))
    if leftovers:
        print(f"note: a prepare that was killed left {' '.join(leftovers)} in {folder}; delete them if none runs now")
    # The process's number keeps two prepares of one folder from writing into the same file.
    paths = {name: folder / f"{name}.{os.getpid()}.tmp" for name in names}
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(path, "wb")) for name, path in paths.items()}
            yield files
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for name, path in paths.items():
            os.replace(path, folder / name)
            sync_folder(folder)  # after each, so that a power cut cannot keep a later name without an earlier one
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut, where the system can do that to a folder."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def dtype_for(tokenizer_size: int) -> np.dtype:
    """uint16 where it holds every id below `tokenizer_size`, else uint32."""
    return np.dtype(np.uint16 if tokenizer_size <= 1 << 16 else np.uint32)


def pack_ids(ids: Iterable[int], tokenizer_size: int) -> np.ndarray:
    """`ids` as an array of the bins' dtype. ValueError if one is not in [0, tokenizer_size): a cast would wrap it."""
    wide = np.asarray(ids, dtype=np.int64)
    if wide.size and not 0 <= wide.min() <= wide.max() < tokenizer_size:
        raise ValueError(f"token ids from {wide.min()} to {wide.max()} do not fit a tokenizer of {tokenizer_size} ids")
    return wide.astype(dtype_for(tokenizer_size))


def split_point(length: int, val_fraction: float) -> int:
    """How many of `length` characters are training data. ValueError where that leaves train or val empty."""
    cut = int(length * (1 - check_fraction(val_fraction)))
    if not 0 < cut < length:
        raise ValueError(
            f"the text has {length:,} characters, too few for train and val; give more text: --data_files="
        )
    return cut


def check_fraction(val_fraction: float) -> float:
    """`val_fraction`, or ValueError if it is not between 0 and 1."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val_fraction={val_fraction} is not between 0 and 1, e.g. --val_fraction=0.1")
    return val_fraction


def write_char_dataset(folder: Path, text: str, source: dict[str, Any], val_fraction: float = 0.1) -> dict[str, Any]:
    """Writes `text` as one id a character: train.bin (the first part), val.bin, meta.pkl (nanoGPT's: vocab_size, itos,
    stoi) and meta.json into `folder`, all whole or none. The vocabulary is the text's characters, sorted.

    `source` describes where the text is from, for meta.json. Returns meta.json's content. ValueError where the text is
    too short.
    """
    cut = split_point(len(text), val_fraction)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    seen = np.zeros(sys.maxunicode + 1, dtype=bool)
    seen[codes] = True
    vocabulary = np.flatnonzero(seen)
    dtype = dtype_for(len(vocabulary))
    id_of_code = np.zeros(len(seen), dtype=dtype)
    id_of_code[vocabulary] = np.arange(len(vocabulary), dtype=dtype)
    ids = id_of_code[codes]

    itos = {number: chr(code) for number, code in enumerate(vocabulary.tolist())}
    stoi = {character: number for number, character in itos.items()}
    meta = describe("char", len(itos), len(itos), cut, len(text) - cut, None, text_source(source, text, val_fraction))
    with atomic_files(folder, "train.bin", "val.bin", "meta.pkl", "meta.json") as files:
        files["train.bin"].write(ids[:cut])
        files["val.bin"].write(ids[cut:])
        files["meta.pkl"].write(pickle.dumps({"vocab_size": len(itos), "itos": itos, "stoi": stoi}))
        files["meta.json"].write(to_json(meta))
    return meta


def write_bpe_text(
    folder: Path, text: str, source: dict[str, Any], tokenizer: str = "gpt2", val_fraction: float = 0.1
) -> dict[str, Any]:
    """Writes one text, split by position and without end-of-text tokens: train.bin, val.bin and meta.json into
    `folder`, all whole or none, in this process. Returns meta.json's content. ValueError where the text is too short
    or the tokenizer cannot be had."""
    encoding = load_tokenizer(tokenizer)
    cut = split_point(len(text), val_fraction)
    train = pack_ids(encoding.encode_ordinary(text[:cut]), encoding.n_vocab)
    val = pack_ids(encoding.encode_ordinary(text[cut:]), encoding.n_vocab)
    meta = describe_bpe(encoding, len(train), len(val), None, text_source(source, text, val_fraction))
    with atomic_files(folder, "train.bin", "val.bin", "meta.json") as files:
        files["train.bin"].write(train)
        files["val.bin"].write(val)
        files["meta.json"].write(to_json(meta))
    (folder / "meta.pkl").unlink(missing_ok=True)  # of an earlier data set of characters; it would be taken for ours
    return meta


def prepare_documents(
    folder: Path, description: str, argv: list[str], load: Callable[[], Any], source: dict[str, Any], expected: int = 0
) -> None:
    """The command of a data set of many documents: writes the Hugging Face data set that load() returns, or the files
    of --data_files, into `folder`. `expected` is the number of documents that the hub should give, where known."""
    args = parse_arguments(
        description,
        argv,
        data_files=None,
        text_key="text",
        tokenizer="gpt2",
        val_fraction=0.0005,
        seed=1337,
        num_proc=os.cpu_count() or 1,
    )
    if args.data_files is not None:
        documents, total, source = read_documents(args.data_files, args.text_key), None, {"data_files": args.data_files}
    else:
        documents, total = hub_documents(load, args.text_key)
        if expected and total != expected:  # the hub converts some large data sets to Parquet only in part
            print(f"note: the hub gave {total} documents; the whole data set would be {expected}")
    meta = write_bpe_dataset(
        folder, documents, source, args.tokenizer, args.val_fraction, args.seed, args.num_proc, total
    )
    report(folder, meta)


def write_bpe_dataset(
    folder: Path,
    documents: Iterable[str],
    source: dict[str, Any],
    tokenizer: str = "gpt2",
    val_fraction: float = 0.0005,
    seed: int = 1337,
    num_proc: int | None = None,
    total: int | None = None,
) -> dict[str, Any]:
    """Writes a stream of documents in its order, the end-of-text token after each (empty ones left out): train.bin,
    val.bin and meta.json into `folder`, all whole or none. `num_proc` processes tokenize (None: one for each core);
    their number does not change a byte. `total`: the number of documents, for the progress bar.

    Returns meta.json's content. ValueError for fewer than two documents, or a tokenizer that cannot be had.
    """
    from tqdm import tqdm

    check_fraction(val_fraction)
    num_proc = (os.cpu_count() or 1) if num_proc is None else num_proc
    if num_proc < 1:
        raise ValueError(f"--num_proc={num_proc} is not a number of processes, e.g. --num_proc={os.cpu_count() or 1}")
    encoding = load_tokenizer(tokenizer)
    if "<|endoftext|>" not in encoding.special_tokens_set:
        raise ValueError(f"--tokenizer={tokenizer} has no <|endoftext|> to end a document with, e.g. --tokenizer=gpt2")

    count = train_tokens = val_tokens = 0
    with atomic_files(folder, "train.bin", "val.bin", "meta.json") as files:
        # disable=None: no bar where stderr is not a terminal
        with tqdm(total=total, unit=" documents", unit_scale=True, disable=None) as bar:
            with closing(tokenize(documents, tokenizer, num_proc)) as chunks:
                for ids, lengths in chunks:
                    to_val = [goes_to_val(seed, index, val_fraction) for index in range(count, count + len(lengths))]
                    mask = np.repeat(to_val, lengths)
                    files["train.bin"].write(ids[~mask])
                    files["val.bin"].write(ids[mask])
                    count += len(lengths)
                    train_tokens += int((~mask).sum())
                    val_tokens += int(mask.sum())
                    bar.update(len(lengths))
        if count < 2:
            raise ValueError(
                f"found {count} document(s) with text, and train and val need one each; give more, or "
                f"split one text by position: python {folder.parent / 'shakespeare' / 'prepare.py'} --data_files="
            )
        source = source | {"val_fraction": val_fraction, "seed": seed}
        meta = describe_bpe(encoding, train_tokens, val_tokens, count, source)
        files["meta.json"].write(to_json(meta))
    (folder / "meta.pkl").unlink(missing_ok=True)  # of an earlier data set of characters; it would be taken for ours
    return meta


def goes_to_val(seed: int, index: int, val_fraction: float) -> bool:
    """Whether the document at `index` (from 0) is validation data: a function of its arguments alone, true for
    `val_fraction` of all, save that of the first two documents always one goes to each side, so that none is empty."""
    if index < 2:
        return index == seed % 2
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def describe(
    tokenizer: str, vocab_size: int, size: int, train_tokens: int, val_tokens: int, documents: int | None, source: dict
) -> dict[str, Any]:
    """The content of meta.json."""
    known = {} if documents is None else {"documents": documents}
    return {
        "dtype": dtype_for(size).name,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "tokenizer_size": size,
        "train_tokens": train_tokens,
        "val_tokens": val_tokens,
        **known,
        "source": source,
    }


def describe_bpe(
    encoding: "tiktoken.Encoding", train_tokens: int, val_tokens: int, documents: int | None, source: dict
) -> dict[str, Any]:
    """The content of meta.json for a tiktoken encoding."""
    padded = -(-encoding.n_vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return describe(encoding.name, padded, encoding.n_vocab, train_tokens, val_tokens, documents, source)


def text_source(source: dict[str, Any], text: str, val_fraction: float) -> dict[str, Any]:
    """`source` and what identifies the text: its length and the SHA-256 of its UTF-8 form."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return source | {"characters": len(text), "sha256": digest, "val_fraction": val_fraction}


def to_json(meta: dict[str, Any]) -> bytes:
    """`meta` as the bytes of a small, readable JSON file."""
    return (json.dumps(meta, indent=2) + "\n").encode()


# ----- tokenizing


def load_tokenizer(name: str) -> "tiktoken.Encoding":
    """The tiktoken encoding `name`. ValueError if it is unknown, or its files are neither cached nor in reach."""
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        raise ValueError(
            f"--tokenizer={name} is unknown; possible: {', '.join(sorted(tiktoken.list_encoding_names()))}"
        )
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"could not load the tokenizer {name} ({type(error).__name__}); tiktoken downloads it once: go online, or "
            "point TIKTOKEN_CACHE_DIR to a folder where it was downloaded"
        ) from error


def tokenize(documents: Iterable[str], tokenizer: str, num_proc: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yields (ids of some documents one after the other, number of ids of each) in the order of `documents`, of which
    it holds a few chunks at a time. ChildProcessError if a worker dies."""
    chunks = chunked(documents)
    if num_proc == 1:
        yield from (encode_chunk(tokenizer, chunk) for chunk in chunks)
        return
    # spawn: a fork of a process with threads (pyarrow, tokenizers) may hang
    pool = ProcessPoolExecutor(num_proc, multiprocessing.get_context("spawn"), initializer=start_worker)
    try:
        pending = deque()
        for chunk in chunks:
            pending.append(pool.submit(encode_chunk, tokenizer, chunk))
            if len(pending) > 2 * num_proc:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ChildProcessError(f"a worker died, perhaps for want of memory; use fewer than {num_proc=}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def chunked(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups documents that are not empty into lists of about CHUNK_CHARACTERS."""
    chunk: list[str] = []
    size = 0
    for document in documents:
        if not document:
            continue
        chunk.append(document)
        size += len(document)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_chunk(tokenizer: str, documents: list[str]) -> tuple[np.ndarray, list[int]]:
    """The ids of all documents, the end-of-text token after each, and the number of ids of each."""
    import tiktoken

    encoding = tiktoken.get_encoding(tokenizer)  # loaded once a process
    ids: list[int] = []
    lengths: list[int] = []
    for document in documents:
        before = len(ids)
        ids += encoding.encode_ordinary(document)
        ids.append(encoding.eot_token)
        lengths.append(len(ids) - before)
    return pack_ids(ids, encoding.n_vocab), lengths


def start_worker() -> None:
    """Makes a worker leave Ctrl-C to its parent, and end with it: one whose parent was killed would wait forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
