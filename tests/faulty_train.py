"""
train.py with injected faults: the one harness of all tests, see runs.start_faulty.

It trains a model of a class of its own, and looks at train.py's variables. The variable FAULTS contains a
JSON object {fault: [step, rank], or a list of these}:
    NAN            the loss is NaN; HIGH: 9 is added to it
    NAN_INPUT      the embeddings are NaN
    NAN_BACKWARD   all gradients of the rank are NaN, before they are reduced
    NAN_GRADIENT   a gradient of the rank is NaN after the reduction; OVERFLOW: inf; LARGE: 9
    DIFFER         a weight of the rank changes
    CRASH          the forward pass raises an error
    WAIT           the forward pass waits until there is a file `go`
"""

import json
import os
import sys
import time
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))

from isogpt.parallel.local_parts import local
from model import GPT

FAULTS = json.loads(os.environ["FAULTS"])
# lines of train.py, and what is there instead
EDITS = {
    "\nfrom model import GPT, GPTConfig\n": "\nfrom model import GPTConfig\n",
    "\n    gradients.finish()": "\n    gradients.finish(), after_backward()",
}


def is_due(fault):
    """Whether this rank has this fault in this step of the loop."""
    places = FAULTS.get(fault, [])
    now = [train["step"], train["ranks"].rank] if "step" in train else None
    return now in places or now == places


class FaultyGPT(GPT):
    def predict(self, *args):
        logits, loss = super().predict(*args)
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
            wait_for_go()
        return logits, loss

    def embed(self, *args):
        x = super().embed(*args)
        return x * float("nan") if self.training and is_due("NAN_INPUT") else x


def wait_for_go():
    print("held by the test", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)


def after_backward():
    """What happens to this rank's gradients and to its weights."""
    p = next(train["raw_model"].parameters())
    for fault, value in (("NAN_GRADIENT", "nan"), ("OVERFLOW", "inf"), ("LARGE", 9)):
        if is_due(fault):
            local(p.grad)[0] = float(value)
    if is_due("DIFFER"):
        local(p.data)[0] += 1e-3


sys.argv[0] = str(HOME / "train.py")
source = Path(sys.argv[0]).read_text()
for line, edited in EDITS.items():
    assert source.count(line) == 1, f"train.py has changed: {line}"
    source = source.replace(line, edited)
train = {"__name__": "__main__", "__file__": sys.argv[0], "GPT": FaultyGPT, "after_backward": after_backward}
exec(compile(source, sys.argv[0], "exec"), train)
