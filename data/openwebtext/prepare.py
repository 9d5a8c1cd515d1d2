"""
OpenWebText in GPT-2 tokens, from the Hugging Face hub: 8 million web pages, each followed by the end-of-text
token. With --data_files=, the script tokenizes your documents instead, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_documents, run

# The hub's conversion to Parquet: the main revision is a loading script, which `datasets` no longer runs.
REVISION = "refs/convert/parquet"


if __name__ == "__main__":
    run(prepare_documents, __file__, __doc__, "Skylion007/openwebtext", {"revision": REVISION})
