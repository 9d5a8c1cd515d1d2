"""
Code shared by the prepare.py scripts: read text, tokenize it, and write train.bin, val.bin and their
metadata.

README.md in this folder describes the files that are read and written.
"""

import argparse
import glob
import hashlib
import json
import math
import os
import pickle
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO
from urllib.request import urlopen

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from train_tokenizer import TRAIN_HELP, number_of_ids, train_tokenizer

from isogpt.common.console import visible
from isogpt.common.files import REPOSITORY, parse_json, sync_folder
from isogpt.common.packages import needed_by
from isogpt.data.text_files import read_text
from isogpt.data.tokenizer import Tokenizer, load
from isogpt.data.vocabulary import Vocabulary, how_to_write_json, tokenizer_in, unread_tokenizer
from isogpt.options.values import problem_of_folder

SHAKESPEARE = {
    "url": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
VOCAB_MULTIPLE = 64  # matrix multiplications are faster with a padded vocabulary: 50257 becomes 50304
TOKENIZER_HELP = (
    "char (an id for each character), the name of a tiktoken encoding, a folder with a tokenizer.json of "
    "Hugging Face, or the folder of a training run, whose vocabulary is used"
)
SEPARATOR_HELP = (
    "what stands between the documents of a .txt file in UTF-8, such as <|endoftext|>; without it, the file "
    "is one document"
)
SPECIAL_HELP = (
    "True: the text of a special token, such as <|endoftext|>, becomes this token; False: it is text"
)
# what unpacks a file with this extension, and what of pandas reads a table
UNPACK = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "xz -dk", ".zst": "zstd -d", ".zip": "unzip"}
PANDAS = {
    ".csv": "read_csv({})",
    ".tsv": 'read_csv({}, sep="\\t")',
    ".json": "read_json({})",
    ".feather": "read_feather({})",
}
CHUNK_DOCUMENTS = 1000  # tokenized at once, by all threads
CHECKED = 100_000  # characters with which a tokenizer is checked
BATCH_ROWS = 1000
BLOCK = 1 << 20  # characters of a .txt file that are read at once
END_OF_DOCUMENT = b"\xff"  # which UTF-8 never contains, so that documents are not hashed as one text
LARGE = 20_000_000  # tokens from which a GPU trains GPT-2 124M rather than a small model


def make_parser(description: str, val_fraction: float, tokenizer: str | int) -> argparse.ArgumentParser:
    """
    The options that all prepare.py scripts share. `tokenizer` is the default of --tokenizer, or if it is a
    number, that of --train_tokenizer; the parsed `tokenizer` is what one of the two says.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--data_files", help="your own .txt, .jsonl, .parquet files: comma-separated paths or globs"
    )
    parser.add_argument(
        "--text_key", default="text", help="key (.jsonl) or column (.parquet) of a document's text"
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write to, created if missing; None: that of this script"
    )
    add_val_fraction(parser, val_fraction)
    either = parser.add_mutually_exclusive_group()
    is_trained = isinstance(tokenizer, int)
    either.add_argument(
        "--tokenizer", default=argparse.SUPPRESS if is_trained else tokenizer, help=TOKENIZER_HELP
    )
    either.add_argument(
        "--train_tokenizer",
        dest="tokenizer",
        metavar="N",
        type=number_of_ids,
        default=tokenizer if is_trained else argparse.SUPPRESS,
        help=TRAIN_HELP,
    )
    parser.add_argument("--special_tokens", default="True", choices=["True", "False"], help=SPECIAL_HELP)
    return parser


def add_val_fraction(parser: argparse.ArgumentParser, default: float) -> None:
    """Add the option --val_fraction."""
    parser.add_argument(
        "--val_fraction", type=fraction, default=default, help="fraction of the data for val.bin"
    )


def fraction(text: str) -> float:
    """Parse a number between 0 and 1, without these."""
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1, e.g. 0.1")
    return number


def cut_for(n: int, val_fraction: float, unit: str) -> int:
    """
    Return how many of n characters or tokens train.bin gets: the first ones. Raises ValueError if one of the
    files would be empty.
    """
    cut = int(n * (1 - val_fraction))
    if not 0 < cut < n:
        problem = f"--val_fraction={val_fraction} of {n:,} {unit} leaves train.bin or val.bin empty"
        advice = "use files with more text" + (", or e.g. --val_fraction=0.1" if n > 1 else "")
        raise ValueError(f"{problem}: {advice}")
    return cut


def run(main: Callable[[list[str]], None]) -> int:
    """
    Call main(arguments) and return the exit status: 1, with a one-line message, for errors that a user can
    fix.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # SystemExit, unlike a kill, removes the temporary files
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        main(sys.argv[1:])
        return 0
    except (ImportError, OSError, ValueError) as error:
        print("error:", visible(" ".join(str(error).split())), file=sys.stderr)
        return 1


# ------------------------------------------------------------------------------------------------------------
# two kinds of data sets: one text, and documents


def prepare_text(
    script: str,
    description: str,
    argv: list[str],
    read: Callable[[Path], tuple[str, dict]],
    tokenizer: str = "char",
) -> None:
    """
    Parse `argv` and write a data set of one text, without end-of-text tokens, to --out or the folder of
    `script`: the first part of the text is train.bin, the rest val.bin.

    Args:
        read: read(folder of `script`) returns the text and its source, if there are no --data_files.
        tokenizer: the default of --tokenizer. With char, there is one id per character, in sort order.

    Raises:
        ValueError: the text is too short, or contains a character that the vocabulary lacks.
    """
    args = make_parser(description, val_fraction=0.1, tokenizer=tokenizer).parse_args(argv)
    if args.data_files is None:
        text, source = read(Path(script).absolute().parent)
    else:
        text = "\n".join(read_documents(args.data_files, args.text_key))
        source = {"data_files": args.data_files}
    cut = cut_for(len(text), args.val_fraction, "characters")
    digest = hashlib.sha256(text.encode()).hexdigest()
    source |= {"characters": len(text), "sha256": digest, "val_fraction": args.val_fraction}
    if args.tokenizer == "char":
        vocabulary = Vocabulary("table", {c: i for i, c in enumerate(sorted(set(text)))})
    elif isinstance(args.tokenizer, int):
        vocabulary = train_tokenizer([text], args.tokenizer)
    else:
        vocabulary = vocabulary_named(args.tokenizer)
    loaded = load(vocabulary, args.special_tokens == "True")
    note_on_loss([text], loaded)
    folder = folder_to_write(script, args.out)
    texts = {"train": SplitText(), "val": SplitText()}
    with atomic_files(folder, *names_of(vocabulary)) as files:
        for split, part in (("train", text[:cut]), ("val", text[cut:])):
            files[f"{split}.bin"].write(pack_ids(loaded.encode(part), loaded.n_ids))
            texts[split].add(part.encode())
        meta = write_meta(files, vocabulary, loaded.n_ids, source, texts)
    report(folder, meta)


def prepare_documents(
    script: str,
    description: str,
    argv: list[str],
    dataset: str,
    selection: dict,
    rows: int = 0,
    tokenizer: str | int = "gpt2",
    **options: Any,
) -> None:
    """
    Parse `argv` and write the documents of a Hugging Face data set, or of --data_files, to --out or the
    folder of `script`. The documents keep their order, and each is followed by the end-of-text token.

    Args:
        selection: arguments of datasets.load_dataset that select a part or version; recorded in meta.json.
        rows: expected number of documents; 0 if unknown.
        tokenizer: the default of --tokenizer, or the number of ids that --train_tokenizer trains by default.
        options: other arguments of datasets.load_dataset.

    Raises:
        ValueError: there are fewer than two documents, or the tokenizer lacks an end-of-text token.
    """
    parser = make_parser(description, val_fraction=0.0005, tokenizer=tokenizer)
    threads = os.cpu_count() or 1
    parser.add_argument("--seed", type=int, default=1337, help="seed of the choice of documents for val.bin")
    parser.add_argument("--num_proc", type=int, default=threads, help="number of tokenizing threads")
    parser.add_argument("--document_separator", default="", help=SEPARATOR_HELP)
    args = parser.parse_args(argv)

    def open_documents() -> tuple[Iterator[str], int | None]:
        if args.data_files is None:
            return open_hub(dataset, selection, options, args.text_key, rows)
        return read_documents(args.data_files, args.text_key, args.document_separator), None

    if isinstance(args.tokenizer, int):
        vocabulary = train_tokenizer(open_documents()[0], args.tokenizer)
    else:
        vocabulary = vocabulary_named(args.tokenizer)
    tokenizer = load(vocabulary, args.special_tokens == "True")
    if tokenizer.end_of_text is None:
        problem = f"the tokenizer contains no {vocabulary.end_of_text} to end documents with"
        advice = "set --tokenizer=gpt2, or use the prepare.py of data/shakespeare, for one text"
        raise ValueError(f"{problem}: {advice}")
    documents, total = open_documents()
    source = {"data_files": args.data_files} if args.data_files else {"dataset": dataset, **selection}
    first = list(islice(documents, 100))
    note_on_loss(list(filter(None, first)), tokenizer)
    documents = chain(first, documents)
    with needed_by("the progress bar", "tqdm"):
        from tqdm import tqdm
    # disable=None: no progress bar if stderr is not a terminal
    documents = tqdm(documents, total=total, unit=" documents", unit_scale=True, disable=None)
    folder, count = folder_to_write(script, args.out), 0
    texts = {"train": SplitText(), "val": SplitText()}
    with atomic_files(folder, *names_of(vocabulary)) as files:
        for count, (document, ids) in enumerate(tokenize(documents, tokenizer, args.num_proc), 1):
            split = "val" if goes_to_val(args.seed, count - 1, args.val_fraction) else "train"
            files[f"{split}.bin"].write(ids)
            texts[split].add(document.encode() + END_OF_DOCUMENT, documents=1)
        if count < 2:
            advice = "data/shakespeare/prepare.py splits one text" if count else "use files with more text"
            raise ValueError(f"found {count} non-empty documents, need 2; {advice}")
        source |= {"val_fraction": args.val_fraction, "seed": args.seed}
        meta = write_meta(files, vocabulary, tokenizer.n_ids, source, texts, documents=count)
    report(folder, meta)


def tokenize(documents: Iterable[str], tokenizer: Tokenizer, num_proc: int) -> Iterator[tuple[str, bytes]]:
    """
    Yield each non-empty document, in order, with its ids and the end-of-text token as bytes of a .bin file.
    """
    documents = filter(None, documents)
    end = tokenizer.end_of_text
    with ThreadPoolExecutor(num_proc) as threads:  # tokenizers release Python's lock while they work
        while chunk := list(islice(documents, CHUNK_DOCUMENTS)):
            for document, ids in zip(chunk, threads.map(tokenizer.encode, chunk), strict=True):
                whole = ids if ids[-1:] == [end] else [*ids, end]
                yield document, pack_ids(whole, tokenizer.n_ids).tobytes()


def goes_to_val(seed: int, index: int, val_fraction: float) -> bool:
    """
    Whether the document at `index` goes to val.bin: a pseudo-random function of the arguments alone. One of
    the first two documents goes to each file, so that neither is empty.
    """
    if index < 2:
        return index == seed % 2
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def report(folder: Path, meta: dict) -> None:
    """Print a summary of the data set in `folder`; `meta` is the content of its meta.json."""
    train, val, size = meta["train_tokens"], meta["val_tokens"], meta["tokenizer_size"]
    print(f"{folder}: {train:,} tokens in train.bin, {val:,} in val.bin, {meta['dtype']}")
    print(f"tokenizer {meta['tokenizer']}: {size:,} ids, vocab_size {meta['vocab_size']:,}")
    if note := note_on_length(train, val):
        print(f"note: {note}")
    if min(train, val) < 2:
        return  # no command can train on it
    small, large = commands_for(folder, meta)
    if large != small:
        print(f"on a GPU: {large}")
    print(f"next: {small}")


def note_on_length(train: int, val: int) -> str:
    """What to do about a val.bin that is shorter than a sequence of config/train_small.py, or ''."""
    needed = block_size_of("config/train_small.py") + 1
    if val >= needed:
        return ""
    half = math.ceil(200 * needed / (train + val)) / 100  # twice as much as needed, since documents differ
    advice = f"set --val_fraction={half:g}" if half <= 0.5 else "use files with more text"
    return f"val.bin is shorter than a sequence of {needed - 1} tokens: {advice}"


def block_size_of(config: str) -> int:
    """The length of a sequence with a config file of this repository."""
    return runpy.run_path(str(REPOSITORY / config)).get("block_size", 1024)


def commands_for(folder: Path, meta: dict) -> tuple[str, str]:
    """
    Return the commands that train on the data set in `folder`, on a CPU and on a GPU. Without a config,
    train.py starts GPT-2 124M with 480 sequences a step: on a CPU, the first step takes minutes.
    """
    name = dataset_name(folder)
    shortest = min(meta["train_tokens"], meta["val_tokens"])

    def command(config: str, options: str = "") -> str:
        length = "" if shortest > block_size_of(config) else f" --block_size={max(1, shortest - 1)}"
        return f"python train.py {config}{options}{length}"

    config, fast = f"config/train_{name}.py", f"config/train_{name}_fast.py"
    if (REPOSITORY / config).exists():
        return command(fast if (REPOSITORY / fast).exists() else config), command(config)
    options = f" --dataset={shlex.quote(name)} --out_dir={shlex.quote(f'out-{folder.name}')}"
    small = command("config/train_small.py", options)
    if meta["train_tokens"] >= LARGE:
        return small, command("config/train_gpt2.py", f"{options} --wandb_log=False")
    is_char = meta["tokenizer"] == "char"
    return small, command("config/train_shakespeare_char.py", options) if is_char else small


def dataset_name(folder: Path) -> str:
    """The value of train.py's --dataset for a folder: the name if the folder is in data/, else the path."""
    places = (Path("data", folder.name), Path(__file__).parent / folder.name)
    has_name = any(place.resolve() == folder.resolve() for place in places)
    return folder.name if has_name else str(folder.absolute())


def folder_to_write(script: str, out: Path | None) -> Path:
    """The folder of `script`, or --out, which is created."""
    if problem := problem_of_folder("--out", str(out or "")):
        raise ValueError(problem)
    folder = out.expanduser() if out else Path(script).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ------------------------------------------------------------------------------------------------------------
# reading text


def read_documents(data_files: str, text_key: str = "text", separator: str = "") -> Iterator[str]:
    """
    Yield the documents of a comma-separated list of files and globs, sorted by path. A .txt file is one
    document, or several with a separator, a .jsonl file contains one per line, a .parquet file one per row.
    All but the first are streamed.

    Raises:
        ValueError: a file does not exist, has a different extension or cannot be parsed.
    """
    readers = {".txt": partial(read_txt, separator=separator), ".jsonl": read_jsonl, ".parquet": read_parquet}
    names: dict[str, str] = {}  # by the file that they lead to
    # a file's name may contain a comma; a shell replaces ~ only at the start of a word
    patterns = [data_files] if os.path.exists(data_files) else map(str.strip, data_files.split(","))
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = set(filter(os.path.isfile, matches))
        if not files:
            problem, example = f"no file matches '{pattern}'", "texts/*.txt,more.jsonl"
            if os.path.isdir(pattern):
                problem, example = f"'{pattern}' is a folder", os.path.join(pattern, "*.txt")
            elif links := list(filter(os.path.islink, matches)):
                problem = f"'{links[0]}' is a link to {os.readlink(links[0])}, which does not exist"
            raise ValueError(f"--data_files: {problem}, e.g. --data_files='{example}'")
        names |= {os.path.realpath(name): name for name in sorted(files)}
    paths = [Path(name) for name in sorted(names.values())]
    for path in paths:  # check all files before reading the first file, which can take hours
        if path.suffix.lower() not in readers:
            problem = f"{path}: unknown extension '{path.suffix}'; possible: {' '.join(readers)}"
            raise ValueError(f"{problem}; {how_to_convert(path)}")
    if any(path.suffix.lower() == ".parquet" for path in paths):
        with needed_by("a .parquet file", "pyarrow"):
            import pyarrow.parquet  # noqa: F401
    for path in paths:
        yield from with_whole_characters(readers[path.suffix.lower()](path, text_key), path)


def with_whole_characters(documents: Iterable[str], path: Path) -> Iterator[str]:
    """
    Replace lone surrogates, which JSON can hold and no UTF-8 text can, as tiktoken does, and report the first
    ones: a tokenizer.json could not store them.
    """
    is_reported = False
    for number, document in enumerate(documents, 1):
        document, count = re.subn("[\ud800-\udfff]", "\ufffd", document)
        if count and not is_reported:
            print(f"note: {path}, document {number}: halves of surrogate pairs are replaced by U+FFFD")
            is_reported = True
        yield document


def how_to_convert(path: Path) -> str:
    """What to type for a file with an unknown extension."""
    name, suffix = shlex.quote(str(path)), path.suffix.lower()
    if suffix in UNPACK:
        return f"type: {UNPACK[suffix]} {name}"
    if suffix in PANDAS:
        source, target = (json.dumps(str(name)) for name in (path, path.with_suffix(".parquet")))
        command = f"import pandas; pandas.{PANDAS[suffix].format(source)}.to_parquet({target})"
        return f"type: python -c {shlex.quote(command)}"
    return "if it contains plain text, rename it to .txt"


def read_txt(path: Path, text_key: str, separator: str = "") -> Iterator[str]:
    """
    Yield the text of the file. With a separator, yield the texts between them, without white space at both
    ends, while the file is read. `text_key` is unused.
    """
    if not separator:
        yield read_text(path)
        return
    document, seen = [], ""
    try:
        with open(path, encoding="utf-8-sig") as file:
            while block := file.read(BLOCK):
                *ends, rest = (seen + block).split(separator)
                for end in ends:
                    yield "".join([*document, end]).strip()
                    document = []
                begun = max(0, len(rest) - len(separator) + 1)  # from here on, a separator may have begun
                document.append(rest[:begun])
                seen = rest[begun:]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from error
    yield "".join([*document, seen]).strip()


def read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    """Yield the string at `text_key` of each line; skip blank lines."""
    with open(path, "rb") as file:
        yield from texts_of(records_of(path, file), path, text_key)


def records_of(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of each line of a .jsonl file that is not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", parse_json(line)
            except ValueError as error:  # invalid JSON or UTF-8
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error


def read_parquet(path: Path, text_key: str) -> Iterator[str]:
    """Yield the column `text_key`."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # None reads all columns, for the error message
            columns = [text_key] if text_key in file.schema_arrow.names else None
            batches = file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
            records = (record for batch in batches for record in batch.to_pylist())
            rows = ((f"{path}, row {number}", record) for number, record in enumerate(records, 1))
            yield from texts_of(rows, path, text_key)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not readable as Parquet ({error})") from error


def texts_of(records: Iterable[tuple[str, Any]], path: Path, text_key: str) -> Iterator[str]:
    """
    Yield record[text_key] of each (place, record), and report the records in which it is null.

    Raises:
        ValueError: a record is not a dict with a string or null there.
    """
    nulls = 0
    for place, record in records:
        if not isinstance(record, dict) or not isinstance(record.get(text_key, 0), str | None):
            problem = f"{place}: no string at '{text_key}' in {str(record)[:200]}"
            raise ValueError(f"{problem}; {advice_on(record)}")
        if record[text_key] is None:
            nulls += 1
        else:
            yield record[text_key]
    if nulls:
        print(f"note: {path}: left out {nulls:,} records with null at '{text_key}'")


def advice_on(record: Any) -> str:
    """What to type if a record contains no text at the key: another key, or how to join several texts."""
    values = record if isinstance(record, dict) else {}
    keys = [key for key, value in values.items() if isinstance(value, str)]
    join = "write one text for each record, as 'Chats and instructions' in data/README.md shows"
    if not keys:
        return join
    return f"set --text_key={keys[0]}" + (f" or {', '.join(keys[1:])}, or {join}" if len(keys) > 1 else "")


def read_shakespeare(folder: Path) -> tuple[str, dict]:
    """
    Return Tiny Shakespeare and its source: the text of input.txt in `folder`, which is downloaded if it does
    not exist. Raises ValueError if the download fails or has a different SHA-256.
    """
    path, url = folder / "input.txt", SHAKESPEARE["url"]
    if not path.exists():
        print(f"downloading {url}")
        try:
            with urlopen(url, timeout=60) as response, atomic_files(folder, path.name) as files:
                data = response.read()
                if hashlib.sha256(data).hexdigest() != SHAKESPEARE["sha256"]:
                    raise OSError(f"{len(data):,} bytes that are not the expected text")
                files[path.name].write(data)
        except OSError as error:
            advice = f"put the text at {path}, or use your own with --data_files="
            raise ValueError(f"could not download {url} ({error}); {advice}") from error
    return read_text(path), {"file": path.name}


def open_hub(
    name: str, selection: dict, options: dict, text_key: str, rows: int
) -> tuple[Iterator[str], int | None]:
    """
    Open a Hugging Face data set. Returns the documents and their number, None if it is unknown. For the
    arguments see `prepare_documents`.
    """
    with needed_by(f"downloading {name}", "datasets"):
        from datasets import load_dataset

    dataset = load_dataset(name, split="train", **selection, **options)
    total = getattr(dataset, "num_rows", None)
    if rows and total != rows:  # the hub converts some large data sets to Parquet only in part
        print(f"note: the hub has {total} of the {rows} documents")
    return read_hub(dataset, text_key), total


def read_hub(dataset: Any, text_key: str) -> Iterator[str]:
    """Yield the column `text_key` of a Hugging Face data set."""
    for batch in dataset.iter(batch_size=BATCH_ROWS):  # much faster than row by row
        if text_key not in batch:
            raise ValueError(f"no column '{text_key}' in {list(batch)}; set --text_key=")
        yield from batch[text_key]


# ------------------------------------------------------------------------------------------------------------
# the vocabulary


def vocabulary_named(name: str) -> Vocabulary:
    """
    The vocabulary that --tokenizer names: of a folder with a tokenizer.json, of a training run's folder, of
    one of these files itself, or an encoding of tiktoken. Raises ValueError if there is none.
    """
    name = os.path.expanduser(name)
    path = Path(name)
    is_part = path.name in ("tokenizer.json", "ckpt.pt") or path.suffix == ".model"
    folder = path.parent if is_part and path.is_file() else path
    if not folder.is_dir():
        if path.is_file() or os.sep in name:
            problem = "is a file" if path.is_file() else "no such folder"
            raise ValueError(f"--tokenizer={name}: {problem}: give a folder that contains a tokenizer.json")
        return Vocabulary("tiktoken", name)
    if vocabulary := tokenizer_in(folder):
        return vocabulary
    # these import torch, which takes seconds
    from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
    from isogpt.checkpoint.search import newest_checkpoint
    from isogpt.checkpoint.source import open_checkpoint

    newest, reports = newest_checkpoint(str(folder))
    if not newest:
        problem = f"--tokenizer={name} contains neither a tokenizer.json nor a checkpoint"
        if unread_tokenizer(folder):
            problem += f", but a tokenizer in another form: {how_to_write_json(folder)}"
        raise ValueError("; ".join([problem, *reports]))
    return vocabulary_of_run(open_checkpoint(newest).run, folder)


def note_on_loss(texts: list[str], tokenizer: Tokenizer) -> None:
    """Print a note if a tokenizer does not keep the text, for instance its capital letters."""
    for line in filter(None, map(str.strip, "\n".join(texts)[:CHECKED].splitlines())):
        decoded = tokenizer.decode(tokenizer.encode(line))
        if line not in decoded:  # tokens may be added at the start and the end
            print(f"note: the tokenizer does not keep the text: {line[:60]!r} becomes {decoded[:60]!r}")
            return


# ------------------------------------------------------------------------------------------------------------
# the bytes of a text, which do not depend on the tokenizer


class SplitText:
    """The number of bytes of a split's text, and its SHA-256, while the text passes by."""

    def __init__(self) -> None:
        self.bytes, self.sha256 = 0, hashlib.sha256()

    def add(self, text: bytes, documents: int = 0) -> None:
        """Add some of the text, in UTF-8, with END_OF_DOCUMENT after each document, which is only hashed."""
        self.bytes += len(text) - documents * len(END_OF_DOCUMENT)
        self.sha256.update(text)

    def facts(self, split: str) -> dict:
        """What meta.json records of the text."""
        return {f"{split}_bytes": self.bytes, f"{split}_text": self.sha256.hexdigest()}


# ------------------------------------------------------------------------------------------------------------
# writing a data set, whole or not at all


def names_of(vocabulary: Vocabulary) -> list[str]:
    """
    Return the files of a data set in the order in which they are written: train.bin, which train.py looks
    for, is last.
    """
    kinds = {"table": ["meta.pkl"], "tokenizer.json": ["tokenizer_config.json", "tokenizer.json"]}
    return ["val.bin", *kinds.get(vocabulary.kind, []), "meta.json", "train.bin"]


@contextmanager
def atomic_files(folder: Path, *names: str) -> Iterator[dict[str, BinaryIO]]:
    """
    Open temporary files for writing, by name. On exit, sync them to disk and move them to `folder`, in the
    order of `names`. An exception leaves `folder` unchanged, also while the files are moved: earlier files
    are moved aside, and are deleted when all new files are there. The last one is moved aside first: after a
    kill it is missing, and earlier and new files are never mixed.
    """
    with TemporaryDirectory(suffix=".tmp", dir=folder) as temporary:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(Path(temporary, name), "wb")) for name in names}
            yield files
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        earlier = Path(temporary, "earlier")
        earlier.mkdir()
        # meta.pkl: the vocabulary of a previous character data set
        of_before = dict.fromkeys([*reversed(names), *(["meta.pkl"] if "meta.json" in names else [])])
        to_move = [(folder / name, earlier / name) for name in of_before if os.path.lexists(folder / name)]
        to_move += [(Path(temporary, name), folder / name) for name in names]
        moved = []
        try:
            for source, target in to_move:
                os.replace(source, target)
                moved.append((source, target))
                sync_folder(folder)  # after each file, so that the order survives a power failure
        except BaseException:
            for source, target in reversed(moved):
                os.replace(target, source)
            raise


def write_meta(
    files: dict[str, BinaryIO],
    vocabulary: Vocabulary,
    size: int,
    source: dict,
    texts: dict[str, SplitText],
    **counts: int,
) -> dict:
    """
    Write the metadata and return the content of meta.json. train.bin and val.bin must be written already;
    `size` is the number of ids of the tokenizer. A table of tokens is written as nanoGPT's meta.pkl.
    """
    dtype = dtype_for(size)
    is_table = "meta.pkl" in files
    padded = size if is_table else -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if is_table:
        tables = {"itos": vocabulary.tokens, "stoi": vocabulary.content}
        files["meta.pkl"].write(pickle.dumps({"vocab_size": size} | tables))
    if vocabulary.kind == "tokenizer.json":
        files["tokenizer.json"].write(vocabulary.content.encode())
        files["tokenizer_config.json"].write(json.dumps({"eos_token": vocabulary.end_of_text}).encode())
    tokens = {f"{split}_tokens": files[f"{split}.bin"].tell() // dtype.itemsize for split in ("train", "val")}
    meta = {"dtype": dtype.name, "vocab_size": padded, "tokenizer": vocabulary.name, "tokenizer_size": size}
    meta |= tokens | texts["train"].facts("train") | texts["val"].facts("val") | counts | {"source": source}
    files["meta.json"].write((json.dumps(meta, indent=2) + "\n").encode())
    return meta


def pack_ids(ids: list[int], tokenizer_size: int) -> np.ndarray:
    """
    Convert `ids` to dtype_for(tokenizer_size). Raises ValueError if an id is not in [0, tokenizer_size).
    """
    wide = np.asarray(ids, dtype=np.int64)
    if wide.size and not 0 <= wide.min() <= wide.max() < tokenizer_size:
        raise ValueError(
            f"token ids from {wide.min()} to {wide.max()} do not fit a tokenizer of {tokenizer_size} ids"
        )
    return wide.astype(dtype_for(tokenizer_size))


def dtype_for(tokenizer_size: int) -> np.dtype:
    """Return uint16 if all ids below `tokenizer_size` fit, else uint32."""
    return np.dtype(np.uint16 if tokenizer_size <= 1 << 16 else np.uint32)
