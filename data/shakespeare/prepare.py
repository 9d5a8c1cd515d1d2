"""Tiny Shakespeare in GPT-2 tokens: one text without end-of-text tokens, the first 90% of its characters for training.
Reads input.txt in the folder of this script, or downloads it if it does not exist."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
from bins import SHAKESPEARE, Parser, fetch_text, read_documents, report, run, write_bpe_text

FOLDER = Path(__file__).absolute().parent


def main(argv: list[str]) -> None:
    """Write the data set to the folder of this script."""
    parser = Parser(__doc__, val_fraction=0.1)
    parser.add_argument("--tokenizer", default="gpt2", help="name of a tiktoken encoding")
    args = parser.parse_args(argv)
    if args.data_files is not None:
        text, source = "\n".join(read_documents(args.data_files, args.text_key)), {"data_files": args.data_files}
    else:
        text, source = fetch_text(FOLDER / "input.txt", **SHAKESPEARE), {"file": "input.txt"}
    report(FOLDER, write_bpe_text(FOLDER, text, source, args.tokenizer, args.val_fraction))


if __name__ == "__main__":
    sys.exit(run(main))
