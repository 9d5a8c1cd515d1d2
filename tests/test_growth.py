"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import itertools
import json
import math
import os
import random
import resource
import sys
import threading
import time
from types import SimpleNamespace

import growth
import pytest
import torch
from growth import (
    buckets,
    failure_report,
    gloo,
    initial_weights,
    loop_memory,
    metrics,
    numbers_drawn,
    open_files,
    part_of_model,
    read_ahead,
    shuffle,
    store,
    watchdogs,
)

from isogpt.checkpoint.owner import write_owner
from isogpt.checkpoint.progress import Progress
from isogpt.common.files import as_record, read_records
from isogpt.common.random_numbers import normal_numbers
from isogpt.launch import network, together
from isogpt.monitor import crashes, curves, sink_plot
from isogpt.monitor.records import as_json
from isogpt.monitor.sink_metrics import MetricsFile, cut_back
from isogpt.monitor.sink_plot import Plot
from isogpt.monitor.watchdog import beat_interval_s, reporters
from isogpt.parallel.compare_weights import TERM, term_of_comparison
from isogpt.parallel.data_parallel import in_buckets
from isogpt.parallel.local_parts import local_parts_by_name
from model import GPT, GPTConfig


def test_the_script_prints_the_costs_of_a_row(zygote, tmp_path):
    run = zygote.start(["buckets"], tmp_path, script="measure/growth.py").wait()
    assert "12,000 tensors" in run.text()


# -- newer_checkpoints


def test_newer_checkpoints_are_not_read():
    """A start from an older step renames them. Threads of earlier tests may read meanwhile, hence twice."""
    costs = growth.newer_checkpoints((10**8, 10**8))
    assert min(cost.amount for cost in costs) < 10**6


# -- open_files


def test_a_rank_connects_to_few_others():
    """In the full mesh of gloo's default, a rank has N - 1 sockets."""
    few, many, host, larger_host = (cost.amount for cost in open_files([8, 24], host_sizes=[1, 5]))
    assert many <= few + 0.5 < 9
    assert 4 < larger_host - host <= 2 * 4, "two of each rank, besides the few of the first store"


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_the_limit_of_open_files_is_raised(at):
    raised = []
    at.set(resource, "prlimit", lambda *arguments: raised.append(arguments) or (1024, 4096))
    at.env("TORCHELASTIC_RUN_ID", "none")
    network.allow_connections()
    both = [(process, resource.RLIMIT_NOFILE, (4096, 4096)) for process in (0, os.getppid())]
    assert raised[1::2] == both, "torchrun may serve the store"


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
    assert more_requests - most <= 3 * 128, "rank 0 waits for the others"
    assert more_answered < 128 * 1000 and more_answered < 8 * answered


@pytest.mark.slow
def test_1024_ranks_start_by_few_requests():
    most, requests, answered = (cost.amount for cost in store([1024]))
    assert requests - most <= 3 * 1024 and answered <= 2e6


# -- read_ahead


@pytest.mark.skipif(sys.platform != "linux", reason="what is read cannot be counted")
def test_windows_read_their_own_pages():
    """This does not depend on the size of the file, nor does what the start reads."""
    for n_tokens in 10**8, 10**9:
        read, at_start = (cost.amount for cost in read_ahead((n_tokens,), windows=64))
        assert read < 3 * 4096 and at_start < 20e6, f"{n_tokens} tokens"


# -- hashing


@pytest.mark.parametrize("ranks, size", [(4, 10**7), pytest.param(4, 10**9, marks=pytest.mark.slow)])
def test_each_rank_hashes_its_part(ranks, size):
    """Rank 0 no more than others, but for the small files that describe the checkpoint."""
    for cost in growth.hashing((ranks,), size):
        assert size / ranks <= cost.amount < size / ranks + 10**5, cost


# -- initial_weights

SMALL = dict(arch="llama", n_layer=4, n_embd=96, n_head=4, n_kv_head=2, n_hidden=164, block_size=8)
SMALL |= dict(vocab_size=67, bias=False, tied=False)
# layouts, with ranks that hold parts of different sizes: with zero 3, some ranks hold nothing
PARTS = [
    ({"zero": 3, "world_size": 3}, range(3)),
    ({"zero": 3, "world_size": 40}, (0, 33, 34, 39)),
    ({"tp": 2, "world_size": 2}, range(2)),
    ({"pp": 2, "pp_schedule": "zbv", "world_size": 2}, range(2)),
    ({"ep": 2, "zero": 3, "tp": 2, "world_size": 8}, (0, 3, 7)),
]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize(("layout", "ranks"), PARTS)
def test_a_rank_draws_its_part_of_the_initial_weights(layout, ranks):
    """The numbers that it holds, which are the bits of one process."""
    args = SMALL | ({"n_expert": 4} if "ep" in layout else {})
    whole = {name: p.detach() for name, p in GPT(GPTConfig(**args), seed=7).named_parameters()}
    for rank in ranks:
        model = part_of_model(args, layout, rank)
        drawn, held = numbers_drawn(model, seed=7), 0
        for name, part in local_parts_by_name(model).items():
            for piece, values in part.cut(whole[name]):
                assert torch.equal(piece, values), name
                held += piece.numel()
        # up to 8 numbers more for each run of numbers, such as the columns of a row that tp divides
        assert drawn <= 1.25 * held < 0.9 * sum(p.numel() for p in whole.values())


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_the_numbers_that_a_rank_draws_shrink_with_the_ranks():
    layouts = [{"zero": 3, "world_size": n} for n in (1, 4, 64)]
    one, few, many = (cost.amount for cost in initial_weights(SMALL | {"n_embd": 256}, layouts))
    assert one / few == pytest.approx(4, rel=0.05) and one / many == pytest.approx(64, rel=0.1)


@pytest.mark.parametrize("shape", [(9, 7), (8, 16), (3, 5, 7), (70000,), (2, 70001), ()])
def test_parts_of_normal_numbers_are_the_bits_of_the_whole(shape):
    """Wherever a part begins and ends: in no part does the place in memory change what numpy computes."""
    whole = normal_numbers(1, "name", shape, [slice(0, n) for n in shape])
    places = random.Random(0)
    for _ in range(40):
        part = tuple(slice(*sorted(places.choices(range(n + 1), k=2))) for n in shape)
        values = normal_numbers(1, "name", shape, part)
        assert values.tobytes() == whole[part].tobytes()
    assert not (whole == normal_numbers(2, "name", shape, [slice(0, n) for n in shape])).any()


def test_normal_numbers_are_normal():
    """Moments, the frequency beyond 1, 2, 3 and 4, and neighbours that are independent, to four sigma."""
    x = torch.from_numpy(normal_numbers(1, "name", (2**20,), (slice(0, 2**20),))).double()
    sigma = len(x) ** -0.5
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * sigma * variance**0.5
    for limit in (1.0, 2.0, 3.0, 4.0):
        p = torch.special.erfc(torch.tensor(limit / 2**0.5).double())
        assert abs((x.abs() > limit).double().mean() - p) < 4 * sigma * p**0.5
    for distance in (1, 2, 8):  # of the same word, of the next word, of the next count
        pairs = x[:-distance] * x[distance:], x[:-distance].square() * x[distance:].square() - 1
        assert abs(pairs[0].mean()) < 4 * sigma and abs(pairs[1].mean()) < 4 * sigma * 8**0.5


# -- metrics


def test_training_reads_as_much_of_a_long_log_as_of_a_short_one():
    short, long = ({c.unit: c.amount for c in metrics((steps,))} for steps in (1_500, 12_000))
    for name in ("a resume", "an evaluation"):
        bytes_read = f"bytes that {name} reads"
        assert abs(long[bytes_read] - short[bytes_read]) < 100
    assert long["bytes that an evaluation reads"] < 1000 and long["MB at peak"] < 1.5 * short["MB at peak"]


def kept_by_definition(lines, step, repeats_evaluation):
    """What metrics.jsonl keeps when it is cut back to `step`, from reading all of it."""
    records = [r for r in map(as_record, lines) if r is not None]
    kept = [r for r in records if "event" in r or r["iter"] < step]
    evaluations = [r for r in records if "val_loss" in r and r["iter"] == step][-1:]
    return kept + (evaluations if not repeats_evaluation else [])


@pytest.mark.parametrize("seed", range(12))
def test_cutting_the_log_back_keeps_what_reading_all_of_it_would_keep(tmp_path, seed):
    """Steps, evaluations and events in a run's order, and what a kill or somebody else leaves."""
    rng, path, lines = random.Random(seed), tmp_path / "metrics.jsonl", []
    for step in range(rng.choice([0, 1, 12])):
        if step % 4 == 0:
            lines.append(json.dumps({"iter": step, "train_loss": 1.0, "val_loss": rng.random()}))
        lines.append(json.dumps({"iter": step, "loss": 1.0, "text": "x" * rng.randrange(300)}))
        lines += [json.dumps({"event": "save", "iter": step})] * rng.randrange(3)
    torn = rng.choice(["", '{"iter": 12, "lo', '{"iter": 12, "train_loss": 1.0, "val_loss": 2.0}', "\0\0"])
    path.write_text("".join(line + "\n" for line in lines) + rng.choice(["", "\n"]) + torn)
    for step in (13, 12, 8, 5, 0):
        repeats = rng.random() < 0.5
        expected = kept_by_definition(path.read_bytes().split(b"\n"), step, repeats)
        cut_back(path, step, repeats)
        kept = [json.loads(line) for line in path.read_text().splitlines() if line]
        assert sorted(map(json.dumps, kept)) == sorted(map(json.dumps, expected))
        assert [r["iter"] for r in kept if "loss" in r] == [r["iter"] for r in expected if "loss" in r]


def test_a_log_that_is_cut_back_changes_no_other_file(tmp_path):
    """It may be a link, or have a second name in a backup of the folder."""
    text = "".join(json.dumps({"iter": step, "loss": 1.0}) + "\n" for step in range(9))
    for name in ("symlink_to", "hardlink_to"):
        out, other = tmp_path / name, tmp_path / f"{name}.jsonl"
        out.mkdir()
        other.write_text(text)
        log = out / "metrics.jsonl"
        getattr(log, name)(other)
        MetricsFile({"out_dir": str(out), "max_iters": 9, "eval_interval": 9}, 5).file.close()
        assert other.read_text() == text and not log.is_symlink()
        assert [json.loads(line)["iter"] for line in log.read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_a_run_that_has_lost_its_folder_does_not_write_to_the_log(tmp_path):
    config = {"out_dir": str(tmp_path), "max_iters": 99, "eval_interval": 9}
    write_owner(tmp_path, "one", None)
    one = MetricsFile(config, 0, "one")
    for step in range(9):
        one.write({"iter": step, "loss": 1.0}, "")
    write_owner(tmp_path, "two", None)
    two = MetricsFile(config, 5, "two")
    with pytest.raises(ValueError, match="a different run was started"):
        one.write({"iter": 9, "loss": 1.0}, "")
    with open(tmp_path / "metrics.jsonl", "a") as file:  # as of somebody who ignores the owner
        file.write("a note\n")
    two.write({"iter": 5, "loss": 2.0}, "")
    assert [r["iter"] for r in read_records(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_a_thinned_curve_is_that_of_the_whole_run(tmp_path):
    """Whenever a run was stopped or rolled back, the points are the same; they are few and evenly spread."""
    records = []
    for step in range(0, 60_000, 3):
        if step % 30 == 0:
            records.append({"iter": step, "train_loss": step / 2, "val_loss": math.nan if step % 60 else 1.0})
        records.append({"iter": step, "loss": step + 0.5, "loss_mean": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(as_json(r)) + "\n" for r in [{"event": "start"}, *records]))
    whole = curves.Curves()
    for record in records:
        whole.add(record)
    assert curves.read_curves(path) == whole
    for began, rollback in ((12_000, 48_000), (48_000, 12_000), (59_994, 59_997)):
        later, past = curves.Curves(), curves.read_curves(path, began)
        for r in records:
            if r["iter"] >= began:
                later.add(r)
        later, began = later.before(rollback), min(began, rollback)
        for r in records:
            if r["iter"] >= max(began, rollback):
                later.add(r)
        joined = past.before(began).followed_by(later)
        assert {n: c.shown()[-1] for n, c in joined.by_name()} == {
            n: c.shown()[-1] for n, c in whole.by_name()
        }
        if rollback > began:
            assert joined == whole
    steps = [step for step, _ in whole.loss.points]
    assert 500 <= len(steps) <= 1000 and {b - a for a, b in itertools.pairwise(steps)} <= {63, 66}
    assert whole.loss.shown()[-1] == (59_997, 59_997.5)


class Slow(Plot):
    """A plot for which the test lets go."""

    def __init__(self, *args):
        super().__init__(*args)
        self.release, self.drawn = threading.Semaphore(0), []  # the last step of each plot

    def draw(self, losses, began):
        self.release.acquire(timeout=60)
        self.drawn.append(losses.loss.last[0][0])
        self.result = "the loss curve: loss.png"


def test_a_slow_plot_delays_no_step_and_the_last_one_is_complete(tmp_path, capsys):
    plot = Slow(str(tmp_path), 0)
    for step in range(8):
        plot.write({"iter": step, "loss": 1.0, "step_ms": 1.0}, "")
        if step in (1, 3, 5):
            plot.write({"iter": step, "train_loss": 1.0, "val_loss": 1.0}, "")
    assert not plot.is_idle.is_set() and not plot.drawn
    for _ in range(2):
        plot.release.release()
    plot.write({"event": "end"}, "")
    assert plot.drawn == [1, 7], "one at a time, and the last steps are there"
    assert capsys.readouterr().out.count("the loss curve: loss.png") == 1


def test_a_plot_that_fails_or_never_ends_is_said_at_the_end(tmp_path, capsys, monkeypatch):
    (tmp_path / "loss.png").mkdir()
    for kind in (Plot, Slow):
        monkeypatch.setattr(sink_plot, "END_S", 60 if kind is Plot else 0.01)
        plot = kind(str(tmp_path), 0)
        plot.write({"iter": 0, "loss": 1.0, "step_ms": 1.0}, "")
        plot.write({"event": "end"}, "")
        assert "no plot of the loss curve: " in capsys.readouterr().out
    plot.release.release()
    assert plot.is_idle.wait(60)


def test_the_end_waits_once_for_a_plot(tmp_path, monkeypatch):
    """All waits for a plot that never ends take END_S together."""
    plot, waits = Slow(str(tmp_path), 0), []
    monkeypatch.setattr(sink_plot, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
    monkeypatch.setattr(plot.is_idle, "wait", waits.append)
    for record in ({"iter": 0, "loss": 1.0, "step_ms": 1.0}, {"iter": 1, "val_loss": 1.0}, {"event": "end"}):
        plot.write(record, "")
    assert sum(waits) == sink_plot.END_S
    plot.release.release()


# -- shuffle


@pytest.mark.parametrize("n_tokens", [10**9, 10**12])
def test_the_shuffle_keeps_nothing_of_the_data_set(n_tokens):
    peak, stays = (cost.amount for cost in shuffle((n_tokens,)))
    assert peak < 1e6 and stays < 1000


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
    together.print_failures({("no disk", True): [*range(1, 1024)]})
    assert capsys.readouterr().err == "error: rank 1, 2, 3, 4, 5, 6, 7, 8 and 1,015 more: no disk\n"
    together.print_failures({(f"no {rank}", True): [rank] for rank in range(1, 1024)})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: rank 1: no 1" and lines[8:] == ["error: and 1,015 more from other ranks"]


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


def test_the_plan_of_a_save_is_gathered_once(tmp_path):
    """Later, rank 0 gathers where the pieces are, and other ranks receive nothing about them."""
    few, many = (growth.shards_of(tmp_path / str(ranks), ranks, tensors=30) for ranks in (4, 8))
    for first, later, others, read in (few, many):
        assert later < 0.6 * first and others < 1000 and read < first
    assert many[1] < 2.2 * few[1]


def test_copies_are_written_once_by_all_of_their_holders(tmp_path):
    growth.shards_of(tmp_path, ranks=8, tensors=32, replicas=4)
    sizes = [path.stat().st_size for path in (tmp_path / "1").glob("*.distcp")]
    assert len(sizes) == 8 and max(sizes) < 1.2 * min(sizes)


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


@pytest.mark.slow  # imports transformers
def test_what_saves_and_conversions_allocate():
    """A save: a copy of weights and moments. A conversion: at most the state itself, once."""
    save, to_file, to_hf = (cost.amount for cost in growth.memory_of_saves())
    assert save < 13
    assert to_file < 13, "24 in the commit before"
    assert to_hf < 1.5, "a file's weights"


# -- loop_memory


@pytest.mark.slow
def test_a_run_that_evaluates_and_saves_takes_no_more_memory_with_each_step():
    """The peak of a run can rise by a megabyte or two when its threads happen to need memory together."""
    in_all, usually = (cost.amount for cost in loop_memory(steps=1500, evaluations=75))
    assert usually < 1e6, "3.5 MB in the code of e430e46"
    assert in_all < 5e6
