"""The alerts: one per verdict other than HEALTHY, and those about the sentinel itself. Data only.

Expressions are of Prometheus 2.42 and later. `for` counts from when the sentinel itself is already sure (2 of 3 steps).
Over 300 lines because all alerts with their words are one table on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlc_sentinel.verdicts import BY_NAME, VERDICTS, VerdictText

JOB = "dlc-sentinel"
"""Name of the scrape job in the shipped prometheus.yml; `up` and `absent` need it."""
RUN = "run {{ $labels.run }} ({{ $labels.model_name }})"
CRITICAL, WARNING = "critical", "warning"


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    severity: str
    for_: str
    keep: str
    """keep_firing_for: a finding that flaps pages once."""
    summary: str
    description: str
    """With the numbers that decide, as Prometheus templates."""
    page: VerdictText
    """The words of the runbook."""
    verdict: str = ""
    board: str = "dlc-overview"

    @property
    def page_name(self) -> str:
        """Name of the runbook's file without .md."""
        return self.verdict or self.name


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    expr: str
    help: str


def value(metric: str, labels: str = "", form: str = "%.3g") -> str:
    """Template text: the newest value of a metric of the alert's run, or "not known"."""
    more = f",{labels}" if labels else ""
    query = f'printf "dlc_sentinel_{metric}{{run=%q{more}}}" $labels.run | query'
    inner = f'{{{{ . | first | value | printf "{form}" }}}}'
    return f"{{{{ with {query} }}}}{inner}{{{{ else }}}}not known{{{{ end }}}}"


_NUMBERS = {
    "STALE_ENGINE": (
        f"Discrepancy rms {value('discrepancy_nats', 'stat=`rms`')} nats against a floor of "
        f"{value('floor_nats', 'stat=`rms`')}."
    ),
    "DATA": (
        f"Usable share of the step {value('usable_tokens_ratio')}, catastrophic "
        f"{value('finding_catastrophic', 'verdict=`DATA`', '%.0f')} (1 = do not train on)."
    ),
    "TRANSFORM": f"Mean discrepancy {value('discrepancy_nats', 'stat=`mean`')} nats.",
    "LABEL": f"Version age mean {value('version_age', 'stat=`mean`')}, largest {value('version_age', 'stat=`max`')}.",
    "ENGINE": (
        f"Discrepancy rms {value('discrepancy_nats', 'stat=`rms`')} nats against a floor of "
        f"{value('floor_nats', 'stat=`rms`')}, catastrophic "
        f"{value('finding_catastrophic', 'verdict=`ENGINE`', '%.0f')} (1 = do not train on)."
    ),
    "LAG": (
        f"Lag ESS {value('action_lag_ess_ratio', '', '%.2f')} (below 0.5 importance weighting no longer works), "
        f"version age mean {value('version_age', 'stat=`mean`')}, mode {{{{ with printf "
        '"dlc_sentinel_mode_info{run=%q}" $labels.run | query }}{{ . | first | label "mode" }}{{ end }}.'
    ),
    "LEARNING": (
        f"Entropy {value('scalar', 'name=`entropy`')}, reward {value('scalar', 'name=`reward`')}, truncated "
        f"{value('scalar', 'name=`truncated_ratio`')}."
    ),
    "UNWIRED": f"Lag rms {value('lag_nats', 'stat=`rms`')} nats at version age {value('version_age', 'stat=`mean`')}.",
    "BLIND": (
        f"Usable share of the step {value('usable_tokens_ratio')}, tokens {value('step_tokens', '', '%.0f')}, last "
        f"step {value('last_step', '', '%.0f')}."
    ),
}
_SEVERITY = {"STALE_ENGINE": CRITICAL, "DATA": CRITICAL}
_FOR = {"STALE_ENGINE": "0s", "DATA": "0s", "LAG": "5m", "BLIND": "10m", "LEARNING": "5m"}
"""LAG: a RESYNC that works ends it sooner. BLIND: the first steps of a run, and a restart, are over sooner."""
_BOARD = {
    "LAG": "dlc-lag", "ENGINE": "dlc-engine", "STALE_ENGINE": "dlc-engine", "TRANSFORM": "dlc-engine",
    "LEARNING": "dlc-learning", "BLIND": "dlc-health", "DATA": "dlc-health",
}  # fmt: skip


def alert_name(verdict: str) -> str:
    """STALE_ENGINE -> DlcStaleEngine."""
    return "Dlc" + "".join(word.capitalize() for word in verdict.split("_"))


def _of_verdict(text: VerdictText) -> Alert:
    return Alert(
        name=alert_name(text.name),
        expr=f'dlc_sentinel_finding_active{{verdict="{text.name}"}} == 1',
        severity=_SEVERITY.get(text.name, WARNING),
        for_=_FOR.get(text.name, "2m"),
        keep="5m",
        summary=f"{text.name} in {RUN}: {text.line}",
        description=(
            f"{_NUMBERS[text.name]} Since step {value('finding_since_step', f'verdict=`{text.name}`', '%.0f')}. "
            f"First: {text.check_first[0]}"
        ),
        page=BY_NAME[text.name],
        verdict=text.name,
        board=_BOARD.get(text.name, "dlc-overview"),
    )


OF_VERDICTS = tuple(_of_verdict(text) for text in VERDICTS if text.name != "HEALTHY")

OF_SENTINEL = (
    Alert(
        name="DlcSentinelDown",
        expr=f'up{{job="{JOB}"}} == 0 or absent(up{{job="{JOB}"}})',
        severity=CRITICAL,
        for_="1m",
        keep="0s",
        summary="dlc-sentinel{{ with $labels.instance }} at {{ . }}{{ end }} cannot be reached",
        description=(
            "Nobody watches the runs; training goes on. Every other number of the sentinel is old. First: is the "
            "process there (`systemctl status dlc-sentinel`, `dlc-sentinel doctor`)? It goes on from its tape when "
            "started again."
        ),
        page=VerdictText(
            name="DlcSentinelDown",
            line="the sentinel cannot be scraped: nobody watches",
            means=(
                "Prometheus gets no answer from the sentinel's metrics port, or no such target is configured. The jobs "
                "are not touched by that: their hooks queue a little, then drop and count. Nothing is judged and "
                "nothing is sent."
            ),
            how_sure="Certain that the scrape fails; the process itself may live behind a network or port problem.",
            check_first=(
                "`systemctl status dlc-sentinel`, or the pod or container, and its last log lines.",
                "On its machine: `curl http://127.0.0.1:9877/healthz`. Answers it, then the way to it is broken.",
                "The target in prometheus.yml: the sentinel listens on loopback unless serve.metrics_host says more.",
            ),
            do=(
                "Start it again with the same --tape: it resumes from the recorded state.",
                "`dlc-sentinel doctor` names a port that is taken, keys that are missing, a full disk.",
            ),
            ignore_when="You stopped it on purpose: silence the alert for that long.",
        ),
        board="dlc-health",
    ),
    Alert(
        name="DlcSentinelStuck",
        expr="time() - dlc_sentinel_published_timestamp_seconds > 30 or dlc_sentinel_verdict_latency_seconds > 10",
        severity=CRITICAL,
        for_="1m",
        keep="2m",
        summary="dlc-sentinel at {{ $labels.instance }} answers but does not keep up ({{ $value | humanizeDuration }})",
        description=(
            "Its newest picture is {{ $value | humanizeDuration }} old, or a verdict took that long. First: CPU and "
            "disk of its machine; a sentinel on the trainer's own cores starves."
        ),
        page=VerdictText(
            name="DlcSentinelStuck",
            line="the sentinel answers but does not keep up",
            means=(
                "The metrics port answers from the last picture, and that picture is old: the loop that reads and "
                "judges is blocked or starved. A watcher that is stuck must not look healthy."
            ),
            how_sure="High: it publishes twice a second when it is well.",
            check_first=(
                "CPU of its machine: `top -H`; is it pinned to the cores of the trainer?",
                "The disk of --tape: full or very slow?",
                "Tokens in, on the Sentinel health board: more than 2 million a second need a core of its own.",
            ),
            do=(
                "Give it a core of its own, or move it to another machine (tcp address with keys).",
                "Restart it; it resumes. Then report what `py-spy dump --pid` said.",
            ),
            ignore_when="A suspended laptop or a paused container just woke up.",
        ),
        board="dlc-health",
    ),
    Alert(
        name="DlcNoData",
        expr=(
            'sum by (run, model_name) (dlc_sentinel_producers{role="trainer",state=~"alive|silent"}) > 0 '
            "unless on (run) sum by (run) (changes(dlc_sentinel_last_step[30m])) > 0"
        ),
        severity=WARNING,
        for_="5m",
        keep="0s",
        summary=f"no step was judged for 30 minutes in {RUN}",
        description=(
            f"{{{{ $value }}}} trainer hooks are there, yet the last judged step is {value('last_step', '', '%.0f')}. "
            "First: is the trainer moving, and does its integration call hook.poll(step) every step?"
        ),
        page=VerdictText(
            name="DlcNoData",
            line="a trainer is there, but no step is judged",
            means=(
                "Hooks of the run show signs of life, and no training step has been closed for half an hour: the "
                "trainer hangs, its steps are longer than that, or its hook no longer sends."
            ),
            how_sure="High where your steps are minutes; none where one step takes more than half an hour.",
            check_first=(
                "The trainer's own log: does its step number move?",
                "Step of each producer, on the Sentinel health board: which one is behind?",
                "Drops by cause: a step whose every token is refused closes late.",
            ),
            do=(
                "Trainer hangs: look for a stuck collective or a dead engine; the sentinel does not restart jobs.",
                "Trainer moves: check that the hook's line about what it wrapped is in the job's stderr.",
                "Steps longer than 25 minutes: raise the window in this rule.",
            ),
            ignore_when="A long evaluation or checkpoint between two steps.",
        ),
        board="dlc-health",
    ),
    Alert(
        name="DlcDropsHigh",
        expr="run:dlc_sentinel_dropped_tokens:ratio_rate10m > 0.01",
        severity=WARNING,
        for_="5m",
        keep="5m",
        summary=f"{{{{ $value | humanizePercentage }}}} of the tokens are not used in {RUN}",
        description=(
            "More than 1 % of what the hooks offered was refused or lost. First: the cause, on the Sentinel health "
            "board; unmatched = ids differ between the two sides, queue_full = the link is too slow."
        ),
        page=VerdictText(
            name="DlcDropsHigh",
            line="tokens are sent and not used",
            means=(
                "More than one token in a hundred was refused by the sentinel or dropped by a hook over ten minutes. "
                "Every one is counted under one cause. The numbers rest on the rest; from 50 % on the verdict is BLIND."
            ),
            how_sure="Certain: these are counts, of both sides.",
            check_first=(
                "Dropped tokens by cause, on the Sentinel health board.",
                "unmatched, join_full: do both sides name the same sample by the same id?",
                "queue_full: is the sentinel on a far or slow link? late: does one rank lag behind?",
                "non_finite, placeholder, positive, mis_sized: the plumbing of logprobs in the job, see DATA.",
            ),
            do=(
                "Repair the ids or the stream that the cause names.",
                "queue_full: put the sentinel nearer (ipc, same node), or raise DLC_SENTINEL_QUEUE_BYTES.",
            ),
            ignore_when="A restart of trainer or engine in mid-step; it falls back below 1 % within ten minutes.",
        ),
        board="dlc-health",
    ),
    Alert(
        name="DlcFramesLost",
        expr=(
            "sum by (run, model_name) (increase(dlc_sentinel_refused_frames_total[10m])) + sum by (run, model_name) "
            "(increase(dlc_sentinel_sequence_gaps_total[10m])) > 0 or sum by (run, model_name) "
            '(increase(dlc_sentinel_refused_frames_total{run=""}[10m])) > 0'
        ),
        severity=WARNING,
        for_="2m",
        keep="10m",
        summary=(
            '{{ $value | printf "%.0f" }} messages were lost or unreadable'
            "{{ with $labels.run }} in run {{ . }}{{ end }}"
        ),
        description=(
            "Gaps in the senders' numbering, or bytes that are no message. First: do job and sentinel run versions "
            "that read each other (one release apart)? Does something else send to the address?"
        ),
        page=VerdictText(
            name="DlcFramesLost",
            line="whole messages are lost or cannot be read",
            means=(
                "The receiver saw gaps in the numbers that every hook gives its messages, or bytes it cannot read. "
                "Whole rows are missing from the statistics, without a cause on the sender's side."
            ),
            how_sure="Certain: counted by the receiver, independently of the senders.",
            check_first=(
                "frame_gap: a hook's process was killed with messages in its socket, or the network dropped them.",
                "unknown_protocol: the versions of hook and sentinel are more than one release apart.",
                "unparsable: something that is no hook sends to this address.",
            ),
            do=(
                "Use the same version on both sides.",
                "Off loopback use keys (`dlc-sentinel keys new DIR`): strangers are then refused before they are read.",
            ),
            ignore_when="A trainer or engine was killed and restarted just then.",
        ),
        board="dlc-health",
    ),
    Alert(
        name="DlcActRefused",
        expr=(
            "sum by (run, model_name, kind, outcome) "
            '(increase(dlc_sentinel_commands_total{outcome=~"refused|expired"}[15m])) > 0'
        ),
        severity=WARNING,
        for_="0s",
        keep="15m",
        summary=f"{{{{ $labels.kind }}}} was {{{{ $labels.outcome }}}} by {RUN}",
        description=(
            f"The job did not do what was asked; it trains on as it was. Lag ESS "
            f"{value('action_lag_ess_ratio', '', '%.2f')}. First: the reason in `dlc-sentinel actions list`."
        ),
        page=VerdictText(
            name="DlcActRefused",
            line="the job refused a command, or let it expire",
            means=(
                "A RESYNC or ABORT was sent and the hook answered that it cannot do it, or no safe point came within "
                "the command's time to live. The cause of the command is still there."
            ),
            how_sure="Certain: it is the job's own answer.",
            check_first=(
                "`dlc-sentinel actions list`: outcome and reason of each command.",
                "refused: can this integration sync weights on demand? `attach` to a running job only watches.",
                "expired: does the loop call hook.poll(step) every step, on every rank?",
            ),
            do=(
                "Sync the weights by hand, or let the stack sync on a shorter period.",
                "Launch the next run with the plug-in, so that RESYNC can be applied.",
            ),
            ignore_when="The job was ending anyway.",
        ),
    ),
    Alert(
        name="DlcBreakerOpen",
        expr="dlc_sentinel_breaker_open == 1",
        severity=CRITICAL,
        for_="0s",
        keep="0s",
        summary=f"RESYNCs had no effect: nothing more is sent to {RUN}",
        description=(
            "Several RESYNCs in a row were applied and changed nothing, so the sentinel stopped sending. First: is "
            "what the engine holds really what was synced (compare one parameter's checksum)?"
        ),
        page=VerdictText(
            name="DlcBreakerOpen",
            line="RESYNCs had no effect, so nothing more is sent",
            means=(
                "The breaker opens after several RESYNCs in a row after which the new rows were no better. It stays "
                "open until somebody resets it: the sentinel does not hammer a job with what does not help."
            ),
            how_sure="High: each effect was judged on the rows of the new version only.",
            check_first=(
                "Did the weights arrive? Compare one parameter's checksum in trainer and engine, see STALE_ENGINE.",
                "Is the lag made within one step (many updates, large learning rate)? Then no sync is fast enough.",
                "Is the discrepancy high instead? Then a sync cannot help, see ENGINE.",
            ),
            do=("Repair what you found, then `dlc-sentinel actions reset`.",),
            ignore_when="Never: without the reset nothing is sent to this run again.",
        ),
    ),
    Alert(
        name="DlcAbortDue",
        expr=(
            "max by (run, model_name, outcome) "
            '(dlc_sentinel_commands_total{kind="ABORT",outcome=~"sent|hypothetical"}) > 0'
        ),
        severity=CRITICAL,
        for_="0s",
        keep="0s",
        summary=(
            f"ABORT is due for {RUN}"
            '{{ if eq $labels.outcome "hypothetical" }} and was NOT sent: the mode does not allow it{{ end }}'
        ),
        description=(
            f"Training on would learn from wrong rows. Discrepancy rms {value('discrepancy_nats', 'stat=`rms`')} nats. "
            "First: `dlc-sentinel actions list` for the reason, then stop the job from its last good checkpoint."
        ),
        page=VerdictText(
            name="DlcAbortDue",
            line="training on would do harm: ABORT is due",
            means=(
                "Either the engine is proven not to hold the weights its label names, or rows are catastrophically "
                "wrong. In mode abort the job was told to checkpoint and end; in any other mode this alert is all "
                "that happens."
            ),
            how_sure="The highest it knows: a second, independent proof is needed, or streams that do not match.",
            check_first=(
                "`dlc-sentinel actions list`: the reason and whether it was sent.",
                "The runbook of STALE_ENGINE, DATA or ENGINE, whichever is open.",
            ),
            do=(
                "Stop the run. Keep the checkpoint from before the finding's first step.",
                "Repair, then resume from that checkpoint under a new DLC_SENTINEL_RUN.",
            ),
            ignore_when="Never.",
        ),
    ),
)

ALERTS = (*OF_VERDICTS, *OF_SENTINEL)

RECORDS = (
    Record(
        "run:dlc_sentinel_dropped_tokens:rate10m",
        "sum by (run, model_name) (rate(dlc_sentinel_dropped_tokens_total[10m]))",
        "Tokens per second that were offered and not used.",
    ),
    Record(
        "run:dlc_sentinel_cur_tokens:rate10m",
        'sum by (run, model_name) (rate(dlc_sentinel_tokens_total{stream="cur"}[10m]))',
        "Tokens per second that the trainer sent.",
    ),
    Record(
        "run:dlc_sentinel_dropped_tokens:ratio_rate10m",
        "run:dlc_sentinel_dropped_tokens:rate10m / (run:dlc_sentinel_cur_tokens:rate10m > 0)",
        "Dropped tokens over those that the trainer sent.",
    ),
    Record(
        "run:dlc_sentinel_resyncs:increase1h",
        'sum by (run, model_name) (increase(dlc_sentinel_commands_total{kind="RESYNC",outcome="applied"}[1h]))',
        "RESYNCs that the job applied in the last hour: often means a sync period or a lower learning rate is wanted.",
    ),
    Record(
        "run:dlc_sentinel_action_lag_ess_ratio:min1h",
        "min by (run, model_name) (min_over_time(dlc_sentinel_action_lag_ess_ratio[1h]))",
        "Lowest lag ESS of the last hour.",
    ),
)
