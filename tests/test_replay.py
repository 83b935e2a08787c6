"""Record a run, replay it, get the same events and commands."""

from __future__ import annotations

import os
import pickle
import signal

import pytest
from factories_job import CONFIG, MIB, Ears, Script, live, stale_job, train

from dlc_sentinel.config import Act, Config, Ess
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.errors import TapeError
from dlc_sentinel.runtime import Runtime, replay
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.replay import last_states, read_state, read_tape
from dlc_sentinel.tape.schema import part_paths


def killed(folder, records):
    """Events of a live run whose process dies after the last record without another word."""
    heard = folder / "heard.pickle"
    child = os.fork()
    if child == 0:
        ears = Ears()
        runtime = Runtime(CONFIG, Script(records), Monitor(CONFIG), Recorder(folder, 64 * MIB, 64 * MIB), [ears])
        while runtime.step(0):
            pass
        heard.write_bytes(pickle.dumps(ears.events))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return pickle.loads(heard.read_bytes())


def facts(events):
    return [(e.kind, e.run, e.step, e.level, e.text, repr(e.data), e.t_s) for e in events]


def test_a_replay_gives_the_live_runs_events_and_commands_twice(tmp_path):
    source, ears = live(tmp_path, stale_job(40, answers=True))

    first, second = replay(tmp_path, CONFIG), replay(tmp_path, CONFIG)

    assert source.commands and {e.kind for e in ears.events} >= {"step", "finding", "command", "ack", "producer"}
    assert facts(first[0]) == facts(second[0]) == facts(ears.events)
    assert [c["id"] for c in first[1]] == [c.id for c in source.commands]
    assert first[2] == second[2]


def test_the_report_of_a_replay_is_that_of_the_live_monitor(tmp_path):
    source, ears = Script(stale_job(30)), Ears()
    runtime = Runtime(CONFIG, source, Monitor(CONFIG), Recorder(tmp_path, MIB, MIB), [ears])
    runtime.run()

    assert replay(tmp_path, CONFIG)[2] == runtime.monitor.report("r1")


def test_a_run_that_ends_inside_a_step_replays_alike(tmp_path):
    _, ears = live(tmp_path, [*stale_job(5), train(5)])

    assert facts(replay(tmp_path, CONFIG)[0]) == facts(ears.events)
    assert [e.step for e in ears.events if e.kind == "step"] == [0, 1, 2, 3, 4, 5]


def test_frames_that_are_no_frames_replay_alike(tmp_path):
    records = [b"garbage", *stale_job(3), b"", bytes([200]) + bytes(20)]
    source, ears = Script(records), Ears()
    runtime = Runtime(CONFIG, source, Monitor(CONFIG), Recorder(tmp_path, MIB, MIB), [ears])
    runtime.run()

    assert runtime.snapshot().num_refused == {"unparsable": 2, "unknown_protocol": 1}
    assert facts(replay(tmp_path, CONFIG)[0]) == facts(ears.events)
    assert [bytes(f.frame) for f in read_tape(tmp_path) if f.frame_no < 0 and f.channel == "data"] == [
        b"garbage", b"", bytes([200]) + bytes(20)
    ]  # fmt: skip


def test_a_killed_and_restarted_sentinel_goes_on_from_its_state_and_replays_alike(tmp_path):
    records = list(stale_job(40))
    cut = next(i for i, r in enumerate(records) if getattr(r, "step", -1) == 14)
    before = killed(tmp_path, records[:cut])
    states = last_states(tmp_path)
    _, after = live(tmp_path, records[cut:], start_s=2000.0, states=states)

    events, commands, report = replay(tmp_path, CONFIG)

    assert facts(events) == facts(before + after.events)
    steps = [e.step for e in events if e.kind == "step"]
    assert steps == list(range(40)) and [s["step"] for s in report["steps"]] == steps
    ids = [command["id"] for command in commands]
    assert len(ids) >= 2 and len(set(ids)) == len(ids)
    assert not [e for e in after.events if "restarted" in e.text]


def test_the_tail_of_a_killed_run_is_in_the_report_but_among_no_events(tmp_path):
    heard = killed(tmp_path, [*stale_job(4), train(4), *[b"no frame"] * 8])

    events, _, report = replay(tmp_path, CONFIG)

    assert facts(events) == facts(heard)
    assert [e.step for e in events if e.kind == "step"] == [0, 1, 2, 3]
    assert [s["step"] for s in report["steps"]] == [0, 1, 2, 3, 4]


def test_a_ring_that_lost_its_beginning_replays_the_rest_from_the_state_of_then(tmp_path):
    _, ears = live(tmp_path, stale_job(60), ring=4 * 40_000, part=40_000)

    events, _, report = replay(tmp_path, CONFIG)
    first = next(read_tape(tmp_path)).t_s
    late = [e for e in ears.events if e.t_s > first + 1.0]

    assert part_paths(tmp_path)[0][0] > 1
    assert [s["step"] for s in report["steps"]] == list(range(60))
    assert [e.data["id"] for e in events if e.kind == "command"] == [e.data["id"] for e in late if e.kind == "command"]
    assert [_own_numbers(e) for e in events if e.kind == "step" and e.t_s > first + 1.0][-5:] == [
        _own_numbers(e) for e in late if e.kind == "step"
    ][-5:]


def _own_numbers(event):
    """What a step says of itself, without what it owes to the steps before it."""
    return {key: value for key, value in event.data.items() if key not in ("loop_gain", "forecast_steps", "floor")}


def test_a_breaker_reset_by_hand_is_replayed(tmp_path):
    source, ears = Script(stale_job(3)), Ears()
    runtime = Runtime(CONFIG, source, Monitor(CONFIG), Recorder(tmp_path, MIB, MIB), [ears])
    runtime.reset_breaker("r1")
    runtime.run()

    assert [e.text for e in ears.events if e.kind == "breaker"] == ["breaker reset by hand"]
    assert facts(replay(tmp_path, CONFIG)[0]) == facts(ears.events)


def test_another_config_judges_the_same_frames_otherwise(tmp_path):
    _, ears = live(tmp_path, stale_job(20))

    events, commands, _ = replay(tmp_path, Config(ess=Ess(threshold=0.01, severe=0.001)))

    assert [e for e in ears.events if e.kind == "command"] and not commands
    assert [e.step for e in events if e.kind == "step"] == list(range(20))


def test_the_state_tape_holds_every_event_of_the_live_run(tmp_path):
    _, ears = live(tmp_path, stale_job(20))

    rows = [(r.kind, r.run, r.step, r.json()["text"]) for r in read_state(tmp_path) if r.kind != "state"]

    assert rows == [(e.kind, e.run, e.step, e.text) for e in ears.events]
    assert [r.step for r in read_state(tmp_path) if r.kind == "state" and r.run == "r1"][-1] == 19


def test_a_replay_of_nothing_recorded_has_no_report(tmp_path):
    live(tmp_path, [])

    assert replay(tmp_path, CONFIG) == ([], [], None)


def test_a_folder_without_a_tape_is_refused(tmp_path):
    with pytest.raises(TapeError, match="no tape here"):
        replay(tmp_path, CONFIG)


def test_only_commands_the_mode_allows_are_sent(tmp_path):
    sent, _ = live(tmp_path / "a", stale_job(20))
    kept, ears = live(tmp_path / "b", stale_job(20), config=Config(act=Act(mode="observe")))

    assert [c.kind for c in sent.commands] and kept.commands == []
    assert [e for e in ears.events if e.kind == "command"]
