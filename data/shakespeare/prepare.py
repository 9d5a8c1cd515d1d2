"""
Tiny Shakespeare in GPT-2 tokens: one text without end-of-text tokens, the first 90% of its characters for
training. The script reads input.txt in its folder, or downloads this file if it does not exist.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_text, run
from read_files import read_shakespeare


def main(argv: list[str]) -> None:
    """Write the data set to the folder of this script, or to --out."""
    prepare_text(__file__, __doc__, argv, read_shakespeare, tokenizer="gpt2")


if __name__ == "__main__":
    sys.exit(run(main))
