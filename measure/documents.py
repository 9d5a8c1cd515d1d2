"""
The validation loss of runs on documents, each of which is read alone and from its beginning. train.py's
validation reads windows that begin anywhere, so it does not show what `--data_order=documents` trains for.

    python measure/documents.py out-documents/*     folders of runs, whose data set has a documents.bin
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from isogpt.checkpoint.search import find_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.data.dataset import Dataset, open_dataset
from isogpt.data.documents import FILE
from isogpt.nn.kernels import IGNORE
from model import GPT, GPTConfig

ROWS = 12  # documents at once


def documents_of(data: Dataset) -> list[torch.Tensor]:
    """The documents of the validation set, each between two end-of-text tokens, which it includes."""
    (source,) = data.sources
    second = np.fromfile(source.folder / FILE, np.int64, 2)[1:]  # begins with the end-of-text token
    end_of_text = int(source.train.read(second, 1)[0, 0])
    val = torch.from_numpy(source.val.read(np.array([0]), len(source.val))[0].astype(np.int64))
    places = (val == end_of_text).nonzero().flatten().tolist()
    return [val[begin : end + 1] for begin, end in pairwise(places)]


@torch.no_grad()
def loss_of(model: GPT, documents: list[torch.Tensor]) -> float:
    """The mean loss of the first block_size tokens of each document, in nats per token."""
    total, count = 0.0, 0
    T = model.config.block_size
    for first in range(0, len(documents), ROWS):
        parts = [document[: T + 1] for document in documents[first : first + ROWS]]
        x = pad_sequence([part[:-1] for part in parts], batch_first=True)  # (rows, T)
        y = pad_sequence([part[1:] for part in parts], batch_first=True, padding_value=IGNORE)
        _, loss = model(x, y, target_count=1)  # summed
        total += loss.item()
        count += int((y != IGNORE).sum())
    return total / count


def main() -> None:
    """Print the loss of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    for folder in parser.parse_args().runs:
        stored, problems = find_checkpoint(folder)
        if stored is None:
            raise SystemExit("; ".join([f"no checkpoint in {folder}", *problems]))
        source = open_checkpoint(stored)
        model = GPT(GPTConfig(**source.run["model_args"])).eval()
        restore_checkpoint(source, model)
        dataset, block_size = source.run["config"]["dataset"], model.config.block_size
        documents = documents_of(open_dataset(dataset, block_size, data_order="documents"))
        print(f"{folder}: {loss_of(model, documents):.4f} nats per token of {len(documents)} documents")


if __name__ == "__main__":
    main()
