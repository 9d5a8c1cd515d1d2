"""
train.py with injected faults: the one harness of all tests, see runs.start_faulty.

The variable FAULTS contains a JSON object {fault: [step, rank], or a list of these}:
    NAN            the loss is NaN; HIGH: 9 is added to it
    NAN_INPUT      the embeddings are NaN
    NAN_BACKWARD   all gradients of the rank are NaN, before they are reduced
    NAN_GRADIENT   a gradient of the rank is NaN after the reduction; OVERFLOW: inf; LARGE: 9
    DIFFER         a weight of the rank changes
    CRASH          the forward pass raises an error
    train, val     this file of the data has been truncated
    WAIT           the forward pass waits until there is a file `go`
"""

import json
import os
import sys
import time
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))

import model
from isogpt.data import reader
from isogpt.parallel import gradients, local_parts
from isogpt.training import precision

FAULTS = json.loads(os.environ["FAULTS"])
now = [-1, -1]  # the step and the rank
seed_step, predict, embed = precision.seed_step, model.GPT.predict, model.GPT.embed
finish, check_ids = gradients.FloatSums.finish, reader.check_ids


def is_due(fault):
    """Whether this rank has this fault in this step."""
    places = FAULTS.get(fault, [])
    return now in places or now == places


def noted_step(seed, step, rank):
    now[:] = step, rank
    seed_step(seed, step, rank)


def faulty_predict(self, *args):
    logits, loss = predict(self, *args)
    if not self.training:
        return logits, loss
    if is_due("NAN"):
        loss = loss * float("nan")
    if is_due("HIGH"):
        loss = loss + 9
    if is_due("NAN_BACKWARD"):
        loss.register_hook(lambda gradient: gradient * float("nan"))
    if is_due("CRASH"):
        raise RuntimeError("a bug")
    if is_due("WAIT"):
        print("held by the test", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
    return logits, loss


def faulty_embed(self, *args):
    x = embed(self, *args)
    return x * float("nan") if self.training and is_due("NAN_INPUT") else x


def faulty_gradients(sums):
    finish(sums)
    p = next(sums.raw_model.parameters())
    for fault, value in (("NAN_GRADIENT", "nan"), ("OVERFLOW", "inf"), ("LARGE", 9)):
        if is_due(fault):
            local_parts.local(p.grad)[0] = float(value)
    if is_due("DIFFER"):
        local_parts.local(p.data)[0] += 1e-3


def faulty_ids(windows, vocab_size, tokens, starts):
    if is_due(tokens.path.stem):
        raise reader.DataError(f"{tokens.path} has been truncated since the start of the run")
    return check_ids(windows, vocab_size, tokens, starts)


precision.seed_step = noted_step
model.GPT.predict = faulty_predict
model.GPT.embed = faulty_embed
gradients.FloatSums.finish = faulty_gradients
reader.check_ids = faulty_ids
sys.argv[0] = str(HOME / "train.py")
source = Path(sys.argv[0]).read_text()
exec(compile(source, sys.argv[0], "exec"), {"__name__": "__main__", "__file__": sys.argv[0]})
