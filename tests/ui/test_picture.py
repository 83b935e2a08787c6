"""The view as a picture file."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET

import pytest
from factories_snapshots import make_finding, make_run

from dlc_sentinel.ui.picture import svg, write

HOSTILE = '</text><script>alert(1)</script>"&\x1b[31m'


def texts(picture):
    return "".join(ET.fromstring(picture).itertext()).replace("\xa0", " ")


def test_the_picture_is_well_formed_and_shows_the_verdict():
    assert "[ok] HEALTHY" in texts(svg(make_run()))


def test_the_same_snapshot_gives_the_same_picture():
    assert svg(make_run()) == svg(make_run())


def test_the_picture_loads_nothing_from_elsewhere():
    picture = svg(make_run()).replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")

    assert "http" not in picture
    assert "font-face" not in picture


def test_text_from_outside_stays_text():
    run = make_run(
        run=HOSTILE, model_name=HOSTILE, findings=(make_finding(advice=HOSTILE, kind=HOSTILE),), verdict="LAG"
    )

    picture = svg(run)

    assert not any("script" in node.tag for node in ET.fromstring(picture).iter())
    assert "<script>alert(1)</script>" in texts(picture)
    assert "\x1b" not in picture


def test_an_svg_is_written_where_asked(tmp_path):
    write(make_run(), tmp_path / "view.svg")

    assert ET.parse(tmp_path / "view.svg").getroot().tag.endswith("svg")


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"got ending '.jpg', wanted .svg or .png"):
        write(make_run(), tmp_path / "view.jpg")


def test_a_png_without_a_browser_says_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(OSError, match=r"chromium.*\.svg instead"):
        write(make_run(), tmp_path / "view.png")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_png_is_written_by_the_browser(tmp_path):
    write(make_run(), tmp_path / "view.png")

    assert (tmp_path / "view.png").read_bytes().startswith(b"\x89PNG")
