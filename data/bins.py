"""
Code shared by the prepare.py scripts: their options, and the two kinds of data sets. read_files.py reads the
text, tokenize_documents.py tokenizes documents, write_files.py writes train.bin, val.bin and their metadata.

README.md in this folder describes the files that are read and written.
"""

import argparse
import hashlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

import numpy as np
from read_files import KINDS, read_documents, read_hub
from tokenize_documents import batches_of, tokenize
from train_tokenizer import TRAIN_HELP, train_tokenizer
from write_files import SplitWriter, atomic_folder, dtype_for, write_meta, write_positions

from isogpt.common.console import visible
from isogpt.common.files import REPOSITORY
from isogpt.common.packages import needed_by
from isogpt.data.shards import open_files
from isogpt.data.tokenizer import Tokenizer, load
from isogpt.data.vocabulary import Vocabulary, table_in, tokenizer_in
from isogpt.options.values import problem_of_folder

TOKENIZER_HELP = (
    "char (an id for each character), the name of a tiktoken encoding, a folder with a tokenizer.json of "
    "Hugging Face, or the folder of a training run, whose vocabulary is used"
)
SPECIAL_HELP = (
    "True: the text of a special token, such as <|endoftext|>, becomes this token; False: it is text"
)
CHECKED = 100_000  # characters with which a tokenizer is checked


def make_parser(
    script: str, description: str, val_fraction: float, tokenizer: str | int
) -> argparse.ArgumentParser:
    """
    The options that all prepare.py scripts share. The parsed `tokenizer` is what --tokenizer or
    --train_tokenizer says, or else `tokenizer`: a number is that of the ids of one to train.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add, either = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--data_files", help=f"your own {' '.join(KINDS)} files: comma-separated paths, folders or globs")
    add("--text_key", default="text", help="key (.jsonl) or column (.parquet) of a document's text")
    add("--out", default=str(Path(script).absolute().parent), help="folder to write to, created if missing")
    add_val_fraction(parser, val_fraction)
    add("--shard_tokens", type=int, default=0, help="tokens of each train_000000.bin and so on; 0: train.bin")
    either("--tokenizer", default=tokenizer, help=TOKENIZER_HELP)
    to_train = {"dest": "tokenizer", "metavar": "N", "type": int, "help": TRAIN_HELP}
    either("--train_tokenizer", default=argparse.SUPPRESS, **to_train)
    add("--special_tokens", default="True", choices=["True", "False"], help=SPECIAL_HELP)
    return parser


def add_val_fraction(parser: argparse.ArgumentParser, default: float) -> None:
    """Add the option --val_fraction."""
    parser.add_argument("--val_fraction", type=fraction, default=default, help="what part goes to val.bin")


def fraction(text: str) -> float:
    """Parse a number between 0 and 1, excluding both."""
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1: type a number such as 0.1")
    return number


def cut_for(n: int, val_fraction: float, unit: str) -> int:
    """
    Return how many of n characters or tokens train.bin gets: the first ones. Raises ValueError if one of the
    files would be empty.
    """
    cut = int(n * (1 - val_fraction))
    if not 0 < cut < n:
        problem = f"--val_fraction={val_fraction} leaves train.bin or val.bin empty ({unit} in all: {n:,})"
        raise ValueError(f"{problem}: use more text, or set --val_fraction=0.1 or the like")
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
    script: str, description: str, argv: list[str], read: Callable[[Path], tuple], tokenizer: str = "char"
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
    args = make_parser(script, description, val_fraction=0.1, tokenizer=tokenizer).parse_args(argv)
    if args.data_files is None:
        text, source = read(Path(script).absolute().parent)
    else:
        text = "\n".join(read_documents(args.data_files, args.text_key))
        source = {"data_files": args.data_files}
    cut = cut_for(len(text), args.val_fraction, "characters")
    digest = hashlib.sha256(text.encode()).hexdigest()
    source |= {"characters": len(text), "sha256": digest, "val_fraction": args.val_fraction}
    vocabulary = find_vocabulary(args.tokenizer, [text])
    loaded = load(vocabulary, args.special_tokens == "True")
    note_on_loss([text], loaded)
    parts = {"train": text[:cut], "val": text[cut:]}
    texts = {split: part.encode() for split, part in parts.items()}
    ids = {split: np.array(loaded.encode(part), dtype_for(loaded.n_ids)) for split, part in parts.items()}
    write(args, vocabulary, loaded, source, [(texts, ids)])


def prepare_documents(
    script: str, about: str, argv: list[str], dataset: str, selection: dict, tokenizer: str | int = "gpt2"
) -> None:
    """
    Parse `argv` and write the documents of a Hugging Face data set, or of --data_files, to --out or the
    folder of `script`. The documents keep their order, and each is followed by the end-of-text token.

    Args:
        about: the description of the script.
        selection: arguments of datasets.load_dataset that select a part or version; recorded in meta.json.
        tokenizer: the default of --tokenizer, or the number of ids that --train_tokenizer trains by default.

    Raises:
        ValueError: there are fewer than two documents, or the tokenizer lacks an end-of-text token.
    """
    parser = make_parser(script, about, val_fraction=0.0005, tokenizer=tokenizer)
    add, affinity = parser.add_argument, getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    add("--seed", type=int, default=1337, help="seed of the choice of documents for val.bin")
    add("--num_proc", type=int, default=cores, help="number of tokenizing processes")
    add("--document_separator", default="", help="what is between the documents of a .txt file, if several")
    args = parser.parse_args(argv)
    with needed_by("the progress bar", "tqdm"):
        from tqdm import tqdm

    def read() -> Iterator[str]:
        if args.data_files is None:
            return filter(None, read_hub(dataset, args.text_key, selection))
        return filter(None, read_documents(args.data_files, args.text_key, args.document_separator))

    vocabulary = find_vocabulary(args.tokenizer, read())
    special_tokens = args.special_tokens == "True"
    loaded = load(vocabulary, special_tokens)
    if loaded.end_of_text is None:
        advice = "set --tokenizer=gpt2, or --train_tokenizer=257, which has an id for each byte"
        raise ValueError(f"the tokenizer lacks {vocabulary.end_of_text}, which ends a document: {advice}")
    documents = read()
    first = list(islice(documents, 100))
    if len(first) < 2:
        advice = "use files with more text; data/shakespeare/prepare.py splits one text"
        raise ValueError(f"2 non-empty documents or more are needed, but there are {len(first)}: {advice}")
    note_on_loss(first, loaded)
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds
    shown = tqdm(chain(first, documents), unit=" documents", unit_scale=True, mininterval=pause, delay=pause)
    batches = batches_of(shown, args.seed, args.val_fraction)
    source = {"data_files": args.data_files} if args.data_files else {"dataset": dataset, **selection}
    source |= {"val_fraction": args.val_fraction, "seed": args.seed}
    tokenized = tokenize(batches, vocabulary, special_tokens, args.num_proc)
    write(args, vocabulary, loaded, source, tokenized)


def write(
    args: argparse.Namespace, vocabulary: Vocabulary, tokenizer: Tokenizer, source: dict, parts: Iterable
) -> None:
    """
    Write a data set, and print the command that trains on it on a CPU.

    Args:
        source: what meta.json records of the text's origin.
        parts: part by part, the text and the ids by split.
    """
    if problem := problem_of_folder("--out", args.out):
        raise ValueError(problem)
    folder, size = Path(args.out).expanduser(), tokenizer.n_ids
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as temporary:
        writers = {split: SplitWriter(temporary, split, args.shard_tokens) for split in ("train", "val")}
        for texts, ids in parts:
            for split, writer in writers.items():
                writer.write(texts[split], ids[split])
        facts = {"source": source}
        if documents := sum(writer.documents for writer in writers.values()):
            tokens = open_files(sorted(temporary.glob("train*.bin")), dtype_for(size).name, size)
            count = write_positions(temporary, tokens, tokenizer.end_of_text)
            facts = {"documents": documents, "train_documents": count, "source": source}
        meta = write_meta(temporary, vocabulary, size, writers, facts)
    tokens = f"{meta['train_tokens']:,} tokens for training, {meta['val_tokens']:,} for validation"
    print(f"{folder}: {tokens}, {meta['dtype']}")
    print(f"tokenizer {meta['tokenizer']}: {size:,} ids, vocab_size {meta['vocab_size']:,}")
    is_in_data = folder.parent.resolve() == Path(__file__).resolve().parent
    name = folder.name if is_in_data else str(folder.absolute())
    for config in (f"config/train_{name}_fast.py", f"config/train_{name}.py"):
        if (REPOSITORY / config).exists():
            print(f"next: python train.py {config}")
            return
    options = f"--dataset={shlex.quote(name)} --out_dir={shlex.quote(f'out-{folder.name}')}"
    print(f"next: python train.py config/train_small.py {options}")


def find_vocabulary(name: str | int, documents: Iterable[str]) -> Vocabulary:
    """
    The vocabulary of --tokenizer: the characters of the documents, that of a folder with a tokenizer.json, or
    of a training run, or an encoding of tiktoken. If `name` is a number, one with so many ids is trained on
    the documents. Raises ValueError if there is none.
    """
    if name == "char":
        characters = sorted(set().union(*documents))
        return table_in({"stoi": {character: i for i, character in enumerate(characters)}})
    if isinstance(name, int):
        return train_tokenizer(documents, name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
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
        raise ValueError("; ".join([problem, *reports]))
    return vocabulary_of_run(open_checkpoint(newest).run, folder)


def note_on_loss(texts: list[str], tokenizer: Tokenizer) -> None:
    """Print a note if a tokenizer does not keep the text, for instance its capital letters."""
    for line in filter(None, map(str.strip, "\n".join(texts)[:CHECKED].splitlines())):
        decoded = tokenizer.decode(tokenizer.encode(line))
        if line not in decoded:  # tokens may be added at the start and the end
            print(f"note: the tokenizer does not keep the text: {line[:60]!r} becomes {decoded[:60]!r}")
            return
