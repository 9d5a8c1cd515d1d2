"""
Code shared by the prepare.py scripts: their options, and the two kinds of data sets. read_files.py reads the
text, tokenize_documents.py tokenizes documents, write_files.py writes train.bin, val.bin and their metadata.

README.md in this folder describes the files that are read and written.
"""

import argparse
import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from read_files import KINDS, read_documents, read_hub, read_shakespeare
from tokenize_documents import batches_of, tokenize
from train_tokenizer import TRAIN_HELP, number_of_ids, train_tokenizer
from write_files import write_data_set

from isogpt.common.console import visible
from isogpt.common.files import REPOSITORY
from isogpt.data.tokenizer import Tokenizer, load
from isogpt.data.vocabulary import Vocabulary, of_characters, tokenizer_in

TOKENIZER_HELP = (
    "char (an id for each character), the name of a tiktoken encoding, a folder with a tokenizer.json of "
    "Hugging Face, or the folder of a training run, whose vocabulary is used"
)
SPECIAL_HELP = "True: the text of a special token, such as <|endoftext|>, becomes this token"
SAMPLE = "This is Some Text"  # which a tokenizer that does not know capital letters changes


def make_parser(
    script: str, about: str, val_fraction: float, tokenizer: str | int
) -> argparse.ArgumentParser:
    """
    The options that all prepare.py scripts share. The parsed `tokenizer` is what --tokenizer or
    --train_tokenizer says: a number is that of the ids of one to train.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add, folder = parser.add_argument, Path(script).absolute().parent
    add("--data_files", help=f"your own {' '.join(KINDS)} files: comma-separated paths, folders or globs")
    add("--text_key", default="text", help="key (.jsonl) or column (.parquet) of a document's text")
    add("--out", type=Path, default=folder, help="folder to write to, created if missing")
    add("--val_fraction", type=fraction, default=val_fraction, help="what part goes to val.bin")
    add("--shard_tokens", type=int, default=0, help="tokens of each train_000000.bin and so on; 0: train.bin")
    add("--tokenizer", default=tokenizer, help=TOKENIZER_HELP)
    to_train = {"dest": "tokenizer", "metavar": "N", "default": argparse.SUPPRESS}
    add("--train_tokenizer", type=number_of_ids, help=TRAIN_HELP, **to_train)
    add("--special_tokens", default="True", choices=["True", "False"], help=SPECIAL_HELP)
    return parser


def fraction(text: str) -> float:
    """Parse a number between 0 and 1, excluding both."""
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def run(main: Callable, *args: Any, **options: Any) -> int:
    """
    Call main(what was typed, *args, **options) and return the exit status: 1, with a one-line message, for
    errors that a user can fix.
    """
    try:
        main(sys.argv[1:], *args, **options)
        return 0
    except (ImportError, OSError, ValueError, BrokenProcessPool) as error:
        print("error:", visible(" ".join(str(error).split())), file=sys.stderr)
        return 1


# ------------------------------------------------------------------------------------------------------------
# two kinds of data sets: one text, and documents


def prepare_text(
    argv: list[str], script: str, about: str, read: Callable = read_shakespeare, tokenizer: str = "char"
) -> None:
    """
    Parse `argv` and write a data set of one text, without end-of-text tokens, to --out or the folder of
    `script`: the first part of the text is train.bin, the rest val.bin.

    Args:
        about: the description of the script.
        read: read(folder of `script`) returns the text and its source, if there are no --data_files.
        tokenizer: the default of --tokenizer. With char, there is one id per character, in sort order.

    Raises:
        ValueError: the text is too short, or contains a character that the vocabulary lacks.
    """
    args = make_parser(script, about, val_fraction=0.1, tokenizer=tokenizer).parse_args(argv)
    if args.data_files is None:
        text, source = read(Path(script).absolute().parent)
    else:
        text = "\n".join(read_documents(args.data_files, args.text_key))
        source = {"data_files": args.data_files}
    digest = hashlib.sha256(text.encode()).hexdigest()
    source |= {"characters": len(text), "sha256": digest, "val_fraction": args.val_fraction}
    vocabulary = find_vocabulary(args.tokenizer, [text])
    loaded = load(vocabulary, args.special_tokens == "True")
    cut = int(len(text) * (1 - args.val_fraction))
    splits = {"train": text[:cut], "val": text[cut:]}
    parts = [((split, part.encode()), loaded.encode(part)) for split, part in splits.items()]
    write(args, vocabulary, loaded, source, parts)


def prepare_documents(
    argv: list[str],
    script: str,
    about: str,
    dataset: str,
    selection: dict,
    tokenizer: str | int = "gpt2",
    separator: str = "",
) -> None:
    """
    Parse `argv` and write the documents of a Hugging Face data set, or of --data_files, to --out or the
    folder of `script`. The documents keep their order, and each is followed by the end-of-text token.

    Args:
        about: the description of the script.
        selection: arguments of datasets.load_dataset that select a part or version; recorded in meta.json.
        tokenizer: the default of --tokenizer, or the number of ids that --train_tokenizer trains by default.
        separator: the default of --document_separator.

    Raises:
        ValueError: there are fewer than two documents, or the tokenizer lacks an end-of-text token.
    """
    from tqdm import tqdm

    parser = make_parser(script, about, val_fraction=0.0005, tokenizer=tokenizer)
    add = parser.add_argument
    add("--seed", type=int, default=1337, help="seed of the choice of documents for val.bin")
    add("--num_proc", type=int, default=os.cpu_count(), help="number of tokenizing processes")
    add("--document_separator", default=separator, help="what is between the documents of a .txt file")
    args = parser.parse_args(argv)

    def read() -> Iterator[str]:
        if args.data_files is None:
            return filter(None, read_hub(dataset, args.text_key, selection))
        return filter(None, read_documents(args.data_files, args.text_key, args.document_separator))

    vocabulary, special_tokens = find_vocabulary(args.tokenizer, read()), args.special_tokens == "True"
    loaded = load(vocabulary, special_tokens)
    if loaded.end_of_text is None:
        advice = "set --tokenizer=gpt2, or --train_tokenizer=257, which has an id for each byte"
        raise ValueError(f"the tokenizer lacks {vocabulary.end_of_text}, which ends a document: {advice}")
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds
    documents = tqdm(read(), unit=" documents", unit_scale=True, mininterval=pause, delay=pause)
    batches = batches_of(documents, args.seed, args.val_fraction)
    source = {"data_files": args.data_files} if args.data_files else {"dataset": dataset, **selection}
    source |= {"val_fraction": args.val_fraction, "seed": args.seed}
    parts = tokenize(batches, vocabulary, special_tokens, args.num_proc)
    write(args, vocabulary, loaded, source, parts)


def write(
    args: argparse.Namespace, vocabulary: Vocabulary, tokenizer: Tokenizer, source: dict, parts: Iterable
) -> None:
    """Write a data set, see write_data_set, and print the command that trains on it on a CPU."""
    if vocabulary.name == "tokenizer.json" and SAMPLE not in tokenizer.decode(tokenizer.encode(SAMPLE)):
        print("note: the tokenizer does not keep the text as it is, for instance capital letters")
    folder = args.out.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    meta = write_data_set(folder, vocabulary, tokenizer, parts, source, args.shard_tokens)
    tokens = f"{meta['train_tokens']:,} tokens for training, {meta['val_tokens']:,} for validation"
    print(f"{folder}: {tokens}, {meta['dtype']}")
    print(f"tokenizer {meta['tokenizer']}: {tokenizer.n_ids:,} ids, vocab_size {meta['vocab_size']:,}")
    is_in_data = folder.parent.resolve() == Path(__file__).resolve().parent
    name = folder.name if is_in_data else str(folder.absolute())
    options = f"--dataset={shlex.quote(name)} --out_dir={shlex.quote(f'out-{folder.name}')}"
    commands = {f"config/train_{name}{kind}.py": "" for kind in ("_fast", "")}
    commands["config/train_small.py"] = f" {options}"
    config = next(config for config in commands if (REPOSITORY / config).exists())
    print(f"next: python train.py {config}{commands[config]}")


def find_vocabulary(name: str | int, documents: Iterable[str]) -> Vocabulary:
    """
    The vocabulary of --tokenizer: the characters of the documents, that of a folder with a tokenizer.json, or
    of a training run, or an encoding of tiktoken. If `name` is a number, one with so many ids is trained on
    the documents. Raises ValueError if there is none.
    """
    if name == "char":
        return of_characters({character: i for i, character in enumerate(sorted(set().union(*documents)))})
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
