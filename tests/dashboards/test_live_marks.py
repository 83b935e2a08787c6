"""`serve` with a Grafana set: what is sent, answered and delivered becomes a mark there, while the job goes on."""

from __future__ import annotations

from contextlib import closing

import pytest
from factories_cli import connect, send_step, wait_until
from factories_grafana import TOKEN, FakeGrafana

from dlc_sentinel.cli.sentinel import Sentinel
from dlc_sentinel.config import Config, Grafana, Serve

pytest.importorskip("grafana_api", reason="grafana-api is not installed")
pytestmark = pytest.mark.slow


def test_a_resync_its_answer_and_a_weight_sync_are_marked_in_grafana(tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    serve = Serve(address=f"ipc://{tmp_path}/s.sock", metrics_port=0, page=False)
    with closing(FakeGrafana()) as grafana:
        config = Config(serve=serve, grafana=Grafana(url=grafana.url, token_file=str(token)))
        with Sentinel(config, alerts=False) as sentinel:
            sentinel.start()
            hook, step, command = connect(sentinel.address), 0, None
            while command is None and step < 200:
                command = send_step(hook, step, gen=0, lag=0.5 if step else 0.0)
                wait_until(lambda at=step: any(r.last_step >= at for r in sentinel.runtime.snapshot().runs), "the step")
                step += 1
            hook.ack(command, "applied", version=step)
            hook.synced(step, step)
            kinds = wait_until(
                lambda: {"RESYNC", "answer", "weight sync"} <= {mark["tags"][1] for mark in grafana.annotations},
                "the marks",
            )
            hook.close()
        assert sentinel.error is None

    assert kinds
    assert all("run:r1" in mark["tags"] and mark["time"] > 1.7e12 for mark in grafana.annotations)
