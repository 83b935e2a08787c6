"""Every query of every panel, asked of a real Prometheus that holds three runs: recorded, replayed and live."""

from __future__ import annotations

import json
import shutil
import time

import factories_boards as boards
import numpy as np
import pytest
import zmq
from factories import make_train
from factories_cli import connect, ended, program, send_step, shuffled
from factories_job import live, train
from factories_prometheus import Prometheus, wait_for

from dlc_sentinel.cli.sentinel import Sentinel
from dlc_sentinel.config import Act, Config, Serve
from dlc_sentinel.records import Ack, Hello, Scalars, Source, StepEnd, Synced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="prometheus is not installed"
    ),
]
AWAITED: frozenset[str] = frozenset()
"""Metrics whose numbers the core does not publish yet; asserted to be empty, so that who publishes them sees red."""
LIVE_ONLY = frozenset({
    "verdict_latency_seconds", "start_timestamp_seconds", "published_timestamp_seconds", "build_info", "runs",
})  # fmt: skip
"""Facts of a process that lives: a recording has none."""
TRAINER = Source("collapse", "trainer", "00000000000000cc")
SCALARS = {
    "reward": 0.4, "entropy": 1.2, "grad_norm": 0.7, "response_length": 96.0, "truncated_ratio": 0.1, "lr": 1e-6,
}  # fmt: skip


def collapse(num_steps=26, *, every=13):
    """The lag of a generator that is not synced until the job obeys a RESYNC; some rows span a weight change."""
    yield Hello(TRAINER, "tiny", dtypes={"engine": "float32", "trainer": "float32"})
    for step in range(num_steps):
        age = step % every
        lag = 0.002 + 0.018 * age
        rng = np.random.default_rng(step)
        yield make_train(step, step, step - age, lag=lag, disc=2e-3, rows=288, length=64, rng=rng, source=TRAINER)
        if age:
            spans = np.array([0, 40, 64, 104], np.int64)
            versions = np.array([step - 1, step, step - 1, step], np.int64)
            yield make_train(
                step, step, step, lag=lag, disc=0.02, rows=2, length=64, rng=rng, source=TRAINER, ids=("k0", "k1"),
                groups=("k", "k"), span_start_K=spans, span_version_K=versions,
                old_version_S=None, micro=1,
            )  # fmt: skip
        yield Scalars(TRAINER, step, SCALARS)
        if age == every - 1:
            yield Ack(TRAINER, "collapse-RESYNC-0001", "applied", step, step + 1)
            yield Synced(TRAINER, step + 1, step, checksum=f"c{step}")
        yield StepEnd(TRAINER, step)


def two_replicas(path, num_steps=6):
    """A .jsonl of a healthy run whose rows come from two engines."""
    rng = np.random.default_rng(3)
    lines = [{"type": "meta", "run": "replicas", "engine_dtype": "float32", "trainer_dtype": "float32"}]
    for step in range(num_steps):
        for row in range(48):
            engine = -rng.exponential(1.5, 48)
            old = engine + rng.normal(0, 1e-4, 48)
            streams = {"engine": engine, "old": old, "cur": old + rng.normal(0, 1e-3, 48)}
            lines.append({
                "type": "seq", "step": step, "version": step, "id": f"s{step}.{row}", "group": f"g{step}.{row // 4}",
                "old_is": "generator", "versions": step, "replica": str(row % 2),
                **{name: np.minimum(values, 0).round(7).tolist() for name, values in streams.items()},
            })  # fmt: skip
        lines.append({"type": "scalars", "step": step, "values": SCALARS})
        lines.append({"type": "synced", "step": step, "version": step + 1})
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def to_tsdb(source, folder, *arguments):
    done = ended(program("replay", source, "--to-tsdb", folder, *arguments))
    assert done.code in (0, 1, 10) and "samples written" in done.err, done.err
    return done


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A Prometheus data folder with the two recorded runs, made by `replay --to-tsdb`."""
    folder = tmp_path_factory.mktemp("tsdb")
    live(folder / "tape", collapse())
    two_replicas(folder / "replicas.jsonl")
    to_tsdb(folder / "tape", folder / "data", "--now")
    to_tsdb(folder / "replicas.jsonl", folder / "data")
    return folder


def refuse_all(hook, step, **changes):
    command = send_step(hook, step, **changes)
    if command is not None:
        hook.ack(command, "refused", reason="this loop cannot sync")
    return command


def with_nan(step):
    engine_N = train(step).engine_N.copy()
    engine_N[::10] = np.nan
    return {"engine_N": engine_N}


def bad_run(sentinel, seen):
    """A live run with refused frames, refused tokens, a refused RESYNC, and rows so wrong that an ABORT is due."""
    hook = connect(sentinel.address, "refusals")
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(sentinel.address.data)
        stranger.send(b"garbage")
        for step in range(3):
            send_step(hook, step)
        seen('dlc_sentinel_last_step{run="refusals"} == 2')
        step = 3
        while refuse_all(hook, step, gen=0, lag=0.5) is None and step < 60:
            seen(f'dlc_sentinel_last_step{{run="refusals"}} >= {step}')
            step += 1
        seen('dlc_sentinel_commands_total{run="refusals",kind="RESYNC",outcome="refused"} >= 1')
        for later in range(step + 1, step + 4):
            send_step(hook, later, **with_nan(later))
        for later in range(step + 4, step + 7):
            send_step(hook, later, **shuffled(later))
        seen('dlc_sentinel_commands_total{run="refusals",kind="ABORT"} >= 1')
        stranger.close(0)
    hook.close()


@pytest.fixture(scope="module")
def prometheus(recorded):
    """The two recorded runs, and a third one scraped while it lives."""
    config = Config(act=Act(mode="resync"), serve=Serve(address=f"ipc://{recorded}/s.sock", metrics_port=0, page=False))
    with Sentinel(config, alerts=False) as sentinel:
        sentinel.start()
        scrape = (
            "scrape_configs:\n- job_name: dlc-sentinel\n  scrape_interval: 300ms\n  scrape_timeout: 300ms\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{sentinel.metrics.port}']}}]\n"
        )
        with Prometheus(recorded, scrape) as prometheus:
            bad_run(sentinel, lambda expr: wait_for(lambda: prometheus.now(expr), expr))
            yield prometheus
        assert sentinel.error is None


def answers(prometheus, query):
    """Series of the last two hours."""
    end_s = time.time() + 5
    return prometheus.over(boards.substituted(query.expr), start_s=end_s - 7200, end_s=end_s, step_s=10)


def metrics(query):
    """Catalogue names of what a query asks for."""
    return {name.removeprefix("dlc_sentinel_") for name, _ in boards.selectors(boards.substituted(query.expr))}


def awaited(query):
    return bool(metrics(query) & AWAITED)


def test_every_query_of_every_panel_returns_series(prometheus):
    empty = [query for query in boards.ALL if not answers(prometheus, query)]

    assert [str(query) for query in empty if not awaited(query)] == []
    assert [str(query) for query in boards.ALL if awaited(query) and query not in empty] == [], "no longer awaited"


def test_every_mark_in_the_curves_returns_series(prometheus):
    assert [str(query) for query in boards.MARKS if not answers(prometheus, query)] == []


def test_the_variables_offer_the_three_runs(prometheus):
    runs = prometheus.ask("label/run/values", **{"match[]": "dlc_sentinel_frames_total"})

    assert set(runs) == {"collapse", "replicas", "refusals"}


def test_a_query_with_a_letter_wrong_returns_nothing(prometheus):
    expr = next(query.expr for query in boards.ALL if "lag_ess_ratio" in query.expr)

    assert answers(prometheus, boards.Query("", "", expr.replace("lag_ess_ratio", "lag_ess_ration"))) == []


@pytest.mark.parametrize("run", ["collapse", "replicas"])
def test_a_recorded_run_is_shown_with_its_own_numbers(prometheus, run):
    end_s = time.time() + 5
    (steps,) = prometheus.over(f'dlc_sentinel_last_step{{run="{run}"}}', start_s=end_s - 7200, end_s=end_s, step_s=1)

    values = [float(value) for _, value in steps["values"]]
    assert values == sorted(values) and values[-1] == {"collapse": 25, "replicas": 5}[run]


def test_the_collapse_of_the_recording_is_seen_by_the_boards(prometheus):
    end_s = time.time() + 5
    where = {"start_s": end_s - 7200, "end_s": end_s, "step_s": 1}
    (ess,) = prometheus.over('dlc_sentinel_action_lag_ess_ratio{run="collapse"}', **where)
    (lag,) = prometheus.over('dlc_sentinel_finding_active{run="collapse",verdict="LAG"}', **where)
    sent = prometheus.over('dlc_sentinel_commands_total{run="collapse",kind="RESYNC",outcome="applied"}', **where)

    assert min(float(value) for _, value in ess["values"]) < 0.5
    assert {value for _, value in lag["values"]} == {"0", "1"}
    assert [value for _, value in sent[0]["values"]][-1] == "1"


def test_what_the_recording_alone_cannot_show_is_only_the_living_process(recorded, tmp_path):
    """`replay --to-tsdb` and no sentinel at all: the boards show the run."""
    shutil.copytree(recorded / "data", tmp_path / "data", ignore=shutil.ignore_patterns("wal", "lock", "*.tmp"))
    with Prometheus(tmp_path, "global: {}\n") as alone:
        empty = [query for query in boards.ALL if not answers(alone, query) and not awaited(query)]

    assert [str(query) for query in empty if not metrics(query) <= LIVE_ONLY] == []
