"""
Tiny Shakespeare in GPT-2 tokens: one text without end-of-text tokens, the first 90% of its characters for
training. The script reads input.txt in its folder, or downloads this file if it does not exist.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_text, run

if __name__ == "__main__":
    run(prepare_text, __file__, __doc__, tokenizer="gpt2")
