"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import time
from types import SimpleNamespace

import pytest
import torch
from growth import buckets, failure_report, watchdogs

from isogpt.checkpoint.progress import Progress
from isogpt.launch import together
from isogpt.monitor import crashes
from isogpt.monitor.watchdog import beat_interval_s, reporters
from isogpt.parallel.compare_weights import TERM, term_of_comparison
from isogpt.parallel.data_parallel import in_buckets

# -- newer_checkpoints

# -- open_files

# -- gloo

# -- store

# -- read_ahead

# -- hashing

# -- initial_weights

# -- metrics

# -- shuffle

# -- failure_report


def test_watching_and_the_report_of_a_failure():
    """One reporter reads all ranks at once; most ranks make one request, and print nothing."""
    size = 40
    costs = failure_report([size], hurry=5)
    watching, requests, answers, lines, longest = ([c.amount for c in costs[i::5]] for i in range(5))
    assert max(watching) <= 2 * size, "while training, a beat and a look at the neighbors in a second"
    assert max(requests) <= size + 200 and max(answers) <= 20 * 120 * size
    assert max(lines) <= 8 and max(longest) <= 2000


def test_what_all_ranks_ask_in_a_second_is_limited():
    for size in (1, 8, 512, 1024, 100_000):
        assert 2 * size / beat_interval_s(size) <= 1000
        assert reporters(size) == {*range(size)} if size <= 8 else len(reporters(size)) == 8


def test_a_report_shows_a_few_of_many_ranks(at):
    """Of those that crashed and do not respond, and the ranks that are elsewhere, if all respond."""
    dogs = watchdogs(600)
    store = dogs[0].store
    for dog in [*dogs[:8], *dogs[16:]]:  # the ranks of a machine have not begun, and have no key
        dog.write_beat()
    at.set(time, "sleep", lambda _: [dog.write_beat() for dog in dogs[500:]])
    dogs[7].leave("KeyError: 'x'")
    store.answers.clear()
    cause = dogs[599].find_cause()
    first = "rank 7 (node-0.cluster.example.org) has failed (KeyError: 'x'), its last position was step 4, "
    assert cause.startswith(f"{first}the start; rank 0 (")
    assert cause.endswith("and 492 more") and cause.count("does not respond") == 7 and len(cause) < 2000
    assert len(store.answers) < 100 + 2 * 50, "of the beats, and of both looks"
    for dog in dogs:
        dog.fate = None
    dogs[3].progress = Progress(1, step=3)
    at.set(time, "sleep", lambda _: [dog.write_beat() for dog in dogs])
    cause = dogs[0].find_cause()
    assert cause.startswith("all ranks respond: rank 3 (node-0.cluster.example.org) at step 3, the start; ra")
    assert cause.endswith("rank 2 (node-0.cluster.example.org) and 596 more at step 4, the start")


def test_the_first_of_many_ranks_print_a_traceback(capsys):
    dogs = watchdogs(20)
    for dog in dogs:
        crashes.explain(dog, KeyError, KeyError("x"), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("KeyError: 'x'") == 8
    assert lines[-1] == "note: 8 ranks have failed; any others print no traceback"
    assert [dog.fate for dog in dogs] == [None] * 8 + [""] * 12, "the others have nothing to add"


def test_ranks_that_agree_gather_nothing(at):
    """Neither while they wait for a disk nor when no rank has failed."""
    at.set(together, "gather_objects", lambda value: pytest.fail("gathered"))
    together.wait_together(None)
    with together.exit_together():
        pass


def test_errors_of_many_ranks_are_a_few_lines(capsys):
    same = {rank: together.Failure("no disk", is_expected=True) for rank in range(1, 1024)}
    together.print_failures(same)
    assert capsys.readouterr().err == "error: rank 1, 2, 3, 4, 5, 6, 7, 8 and 1,015 more: no disk\n"
    together.print_failures({rank: failure._replace(message=f"no {rank}") for rank, failure in same.items()})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: rank 1: no 1" and lines[8:] == ["error: and 1,015 more of other ranks"]


def test_weights_are_compared_by_one_number():
    """All checksums are gathered only if the sum over the ranks shows that some differ."""
    model, checksums = torch.nn.Linear(2, 2), {("weight", (0, 0), 0): -7, ("bias", (0,), 0): 2**40 + 1}
    terms = []
    for rank in range(300):
        holders = SimpleNamespace(without=lambda _, rank=rank: SimpleNamespace(index=rank, size=300))
        mesh = SimpleNamespace(pp=1, holders=lambda p, holders=holders: holders)
        terms.append(term_of_comparison(model, mesh, checksums))
        if rank == 7:
            changed = term_of_comparison(model, mesh, checksums | {("bias", (0,), 0): 5}) - terms[-1]
    assert sum(terms) % TERM == 0 and (sum(terms) + changed) % TERM and sum(terms) < 2**63


# -- sharded_metadata

# -- buckets


def test_buckets_are_linear_and_the_same():
    fewer, more = (cost.amount for cost in buckets([1000, 2000]))
    assert more < 2.1 * fewer
    sizes = [3, 0, 4, 5, 9, 8, 0, 1, 7, 20, 0, 6, 2, 2, 2]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert [[len(t) for t in bucket] for bucket in in_buckets(tensors, 8)] == [
        *([3, 0, 4], [5], [9], [8, 0], [1, 7], [20], [0, 6, 2], [2, 2])
    ]
    assert [*in_buckets([])] == []


# -- memory_of_saves

# -- loop_memory
