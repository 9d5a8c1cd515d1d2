"""
Tiny Shakespeare at character level: 1.1 million characters, 65 of which are different. The script reads
input.txt in its folder, or downloads this file if it does not exist.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_text, run

if __name__ == "__main__":
    run(prepare_text, __file__, __doc__)
