"""report: the post-mortem of a recorded run as files."""

from __future__ import annotations

import re
import shutil

import pytest
from factories_job import live, stale_job, train

from dlc_sentinel.offline.export import export
from dlc_sentinel.records import Source, StepEnd

SECRET = "xoxb-s3cr3t"


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    """26 steps, synced every 12: ESS falls below one half before each sync."""
    folder = tmp_path_factory.mktemp("tape")
    live(folder, stale_job(26, answers=True))
    return folder


def test_a_tape_becomes_one_small_page_with_verdict_tokens_and_what_was_sent(cli, tape, home):
    done = cli("report", tape, "--out", "x.html")
    page = (home / "x.html").read_text()

    assert (done.code, done.out) == (0, "x.html\n")
    assert len(page) < 5_000_000
    for part in ("LAG", "RESYNC", "sync_weights", "applied", "Worst tokens", "ess.horizon", "delivered 2 times"):
        assert part in page, part
    assert page.count('class="strip"') == 12
    assert not re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)


def test_a_file_of_lines_is_told_too_without_times_of_day(cli, tape, home):
    export(tape, home / "run.jsonl.gz")
    done = cli("report", "run.jsonl.gz", "-o", "x.html")
    page = (home / "x.html").read_text()

    assert done.code == 0
    assert "Worst tokens" in page
    assert page.count('class="strip"') == 12
    assert "UTC" not in page


def test_two_recordings_are_compared(cli, tape, tmp_path, home):
    live(tmp_path / "b", stale_job(10))
    done = cli("report", tape, tmp_path / "b", "-o", "x.html", "--markdown", "--json")
    page, text = (home / "x.html").read_text(), (home / "x.md").read_text()

    assert done.json() == {"verdict": "LAG", "run": "r1", "files": ["x.html", "x.md"]}
    assert "Both runs" in page
    assert "26 (0 to 25)" in page
    assert "10 (0 to 9)" in page
    assert "| steps | 26 (0 to 25) | 10 (0 to 9) |" in text


def test_of_several_runs_on_a_tape_the_worst_is_told_and_the_others_are_named(cli, home):
    healthy = Source("r2", "trainer", "00000000000000bb")
    later = [train(step, source=healthy) for step in range(24, 28)]
    live(home / "tape", [*stale_job(20), *later, StepEnd(healthy, 27)])

    done = cli("report", "tape", "-o", "x.html", "--json")

    assert done.json()["run"] == "r1"
    assert "this is run r1; also on this tape: r2 HEALTHY (--run NAME shows one)" in done.err


def test_a_secret_of_the_settings_is_not_in_the_page(cli, tape, home, monkeypatch):
    monkeypatch.setenv("DLC_SENTINEL_CFG_NOTIFY_URLS", f"slack://{SECRET}/B/C")
    cli("report", tape, "-o", "x.html", "--markdown")

    assert "notify.urls" in (home / "x.html").read_text()
    assert SECRET not in (home / "x.html").read_text() + (home / "x.md").read_text()


def test_what_is_no_recording_is_a_usage_error(cli, home):
    done = cli("report", "nowhere")

    assert done.code == 2
    assert "nowhere" in done.err
    assert not (home / "report.html").exists()


def test_a_picture_without_a_browser_says_what_is_needed(cli, tape, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")

    assert "chromium" in cli("report", tape, "-o", "x.html", "--png").err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_main_figure_becomes_a_picture(cli, tape, home):
    assert cli("report", tape, "-o", "x.html", "--png").out == "x.html\nx.png\n"
    assert (home / "x.png").read_bytes().startswith(b"\x89PNG")
