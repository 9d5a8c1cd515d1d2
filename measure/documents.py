"""
The validation loss of runs on documents, each of which is read alone and from its beginning. train.py's
validation reads windows that begin anywhere, so it does not show what `--data_order=documents` trains for.

    python measure/documents.py out-documents/*     folders of runs, whose data set has a documents.bin
"""

import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import numpy as np
import torch
import torch.nn.functional as F

from isogpt.data.dataset import Dataset, open_dataset
from isogpt.nn.kernels import IGNORE
from model import GPT, GPTConfig

ROWS = 12  # documents at once


def documents_of(data: Dataset) -> list[torch.Tensor]:
    """The documents of the validation set, each between two end-of-text tokens, which it includes."""
    (source,) = data.sources
    second = source.windows.index.read(np.array([1]), 1)[0]  # where it begins, with the end-of-text token
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
        x = torch.nn.utils.rnn.pad_sequence([part[:-1] for part in parts], batch_first=True)  # (rows, T)
        y = torch.nn.utils.rnn.pad_sequence(
            [part[1:] for part in parts], batch_first=True, padding_value=IGNORE
        )
        logits, _ = model(x, y)
        total += F.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()
        count += int((y != IGNORE).sum())
    return total / count


def main() -> None:
    """Print the loss of each run."""
    for folder in sys.argv[1:]:
        checkpoint = torch.load(Path(folder) / "ckpt.pt", map_location="cpu", weights_only=True)
        config = GPTConfig(**checkpoint["model_args"], **checkpoint["isogpt"]["model_args"])
        model = GPT.from_state(config, checkpoint["model"]).eval()
        data = open_dataset(checkpoint["config"]["dataset"], config.block_size, data_order="documents")
        documents = documents_of(data)
        print(f"{folder}: {loss_of(model, documents):.4f} nats per token of {len(documents)} documents")


if __name__ == "__main__":
    main()
