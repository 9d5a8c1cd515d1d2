"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import json
import os
import pickle
import resource
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from growth import buckets, failure_report, gloo, open_files, store, watchdogs
from torch.distributed import DistNetworkError

from isogpt.checkpoint.progress import Progress
from isogpt.launch import open_files as open_limit
from isogpt.launch import together
from isogpt.launch.machines import Process, Repeated, survey
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.monitor import crashes
from isogpt.monitor.log import Logger
from isogpt.monitor.watchdog import Watchdog, beat_interval_s, reporters
from isogpt.parallel.compare_weights import TERM, term_of_comparison
from isogpt.parallel.data_parallel import in_buckets

# -- newer_checkpoints

# -- open_files


def test_a_rank_connects_to_few_others():
    """In the full mesh of gloo's default, a rank has N - 1 sockets."""
    few, many, host, larger_host = (cost.amount for cost in open_files([8, 24], host_sizes=[1, 5]))
    assert many <= few + 0.5 < 9
    assert 4 < larger_host - host <= 2 * 4, "two of each rank, besides the few of the first store"


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_the_limit_of_open_files_is_raised(at):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
        assert open_limit.raise_limit() == limits[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    raised = []
    at.set(open_limit, "raise_limit", lambda process=0: raised.append(process))
    at.env("TORCHELASTIC_RUN_ID", "none")
    open_limit.allow_connections(1, 8)
    assert raised == [0, os.getppid()], "torchrun may serve the store"


def test_too_few_open_files_are_named_before_anything_fails(at):
    at.set(open_limit, "raise_limit", lambda process=0: 1024)
    open_limit.allow_connections(0, 241)
    open_limit.allow_connections(1, 4096)  # rank 0 says it
    text = "the store of 4,096 ranks needs 12588 open files, but rank 0 on .* may have 1024: type ulimit -n"
    with pytest.raises(ValueError, match=f"{text} 12588 as root"):
        open_limit.allow_connections(0, 4096)
    at.set(open_limit, "raise_limit", lambda process=0: None)
    open_limit.allow_connections(0, 4096)  # a system that does not say


def test_too_many_open_files_are_explained(at, capsys):
    """In the message of an error of any kind: of the file system, of gloo, of the store."""
    logger, text = Logger(Progress(1, step=4), []), "socket: Too many open files"
    for error in (OSError(24, "Too many open files", "x"), RuntimeError(text), DistNetworkError(text)):
        dog = Watchdog(Ranks(0, 1, torch.device("cpu"), "gloo"), 600.0, logger.progress, logger)
        crashes.explain(dog, type(error), error, None)
        said = capsys.readouterr().err
        assert "Too many open files" in said and "type ulimit -n 65536 as root" in said
        assert said.count("error:") == 1 == said.count("\n")
    assert open_limit.explained("[Errno 2] No such file") == "[Errno 2] No such file"


# -- gloo


def test_gloos_addresses_are_linear_in_ranks():
    """2 N^2 requests and N^2 (157 + 8 N) bytes in the full mesh of gloo's default."""
    (_, requests, answered), (most, more_requests, more_answered) = (
        [cost.amount for cost in gloo([size])] for size in (8, 32)
    )
    assert more_requests < 5 * requests and more_answered < 5 * answered
    assert most <= 1 + 3 * (2 + 5), "a ring and a tree of 32"


# -- store


def test_ranks_know_each_other_by_few_bytes():
    """Every rank used to read every rank's cores: 944 N^2 bytes."""
    (_, requests, answered), (most, more_requests, more_answered) = (
        [cost.amount for cost in store([size])] for size in (32, 128)
    )
    assert most <= 100 and more_requests < 10 * requests
    assert more_answered < 128 * 1000 and more_answered < 6 * answered


@pytest.mark.slow
def test_1024_ranks_start_by_few_requests():
    most, requests, answered = (cost.amount for cost in store([1024]))
    assert most <= 100 and requests <= 100 * 1024 and answered <= 2e6


def test_the_answer_of_rank_0_lists_machines_once():
    sizes = []
    for size in (1024, 4096):
        names = [f"node-{rank // 8}" for rank in range(size)]
        answers = survey([Process(name, "k", "0-95", 8, f"agent of {name}") for name in names])
        assert json.loads(answers[f"place/{size - 1}"]) == [size - 1, 8]
        sizes.append(len(answers["machines"]))
    assert sizes[0] < 1000 and sizes[1] < 4 * 1000


def test_what_is_the_same_on_all_ranks_is_sent_as_a_digest(at):
    """All ranks' settings on each rank were N^2 bytes."""
    others, sent = [{"seed": 1}] * 3, []

    def gather(rows, row, group):
        if len(row) == 3:  # digests: this rank's for the others
            sent.append(row)
            rows.copy_(torch.cat([row, *[sent[0]] * (len(others) - 1)]))
        else:
            padded = [torch.tensor([*pickle.dumps(other)], dtype=torch.uint8) for other in others]
            rows.copy_(torch.stack([F.pad(p, (0, len(row) - len(p))) for p in padded]).flatten())
            sent.append(row)

    at.set(together, "all_gather_single", gather)
    at.set(torch.distributed, "is_initialized", lambda: True)
    at.set(torch.distributed, "get_world_size", lambda group=None: len(others))
    assert together.gather_objects(others[0]) == others and len(sent) == 1 and sent[0].nbytes == 24
    others = [{"seed": 2}, *others[1:]]
    assert together.gather_objects(others[0]) == others and len(sent) == 3


def test_ranks_names_are_made_when_asked_for():
    """A list of the names, which each rank made, was N^2: each name looked at all hosts."""
    looked = []

    class Hosts(Repeated):
        def __getitem__(self, rank):
            looked.append(rank)
            return super().__getitem__(rank)

    names = rank_names(Hosts(["a", "b"], [1000, 1000]))
    assert len(names) == 2000 and not looked
    assert names[1999] == "rank 1999 (b)" and len(looked) <= 3000


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
