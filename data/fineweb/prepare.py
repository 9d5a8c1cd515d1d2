"""
FineWeb-Edu's 10-billion-token sample in GPT-2 tokens, streamed from the Hugging Face hub: only the .bin files
take disk space. With --data_files=, the script tokenizes your documents instead, without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_documents, run

if __name__ == "__main__":
    run(prepare_documents, __file__, __doc__, "HuggingFaceFW/fineweb-edu", {"name": "sample-10BT"})
