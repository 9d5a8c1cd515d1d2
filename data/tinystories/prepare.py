"""
TinyStories: 2.1 million stories in the words of small children (Eldan and Li, 2023), streamed from the
Hugging Face hub, with a tokenizer of 4,096 ids that is trained on them. With --data_files=, the script reads
local files without a network, such as the hub's TinyStoriesV2-GPT4-train.txt.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_documents, run

# few words: a larger vocabulary would cost a small model time
DEFAULTS = {"tokenizer": 4096, "document_separator": "<|endoftext|>"}

if __name__ == "__main__":
    run(prepare_documents, __file__, __doc__, "roneneldan/TinyStories", {}, **DEFAULTS)
