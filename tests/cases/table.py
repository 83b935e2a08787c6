"""The public cases: runs that a mismatch hurt, or that their monitors misled, each as numbers and with its verdict.

One `Case` per report (a letter where one report holds several), made by a function of the `*_runs.py` beside.
`NOT_BUILT` names what the sentinel cannot say yet and the rule that is missing; a line there goes when its rule comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cases import data_runs, engine_runs, policy_runs
from factories import Job

BF16 = {"engine": "bfloat16", "trainer": "bfloat16"}
FP32 = {"engine": "float32", "trainer": "float32"}
FP16 = {"engine": "float16", "trainer": "float16"}
FP8 = {"engine": "float8_e4m3", "trainer": "bfloat16"}
MOE = {"engine": "moe", "trainer": "moe"}

RESYNC, ABORT, NOTHING = {"RESYNC"}, {"ABORT"}, frozenset()
FAULTS = ("STALE_ENGINE", "DATA", "TRANSFORM", "LABEL", "ENGINE", "LAG")


@dataclass(frozen=True)
class Case:
    number: str
    name: str
    verdict: str | tuple[str, ...]
    """Several where the report leaves it open."""
    run: Callable[[Job], None]
    kind: str | tuple[str, ...] = ()
    """Wanted kind of the finding that names the verdict; none = not asked."""
    also: tuple[str, ...] = ()
    """Verdicts that must have a finding, too."""
    never: tuple[str, ...] = ()
    """Verdicts that no finding may have at any time."""
    sends: frozenset[str] | set[str] | None = None
    """Kinds of all commands issued; None = not asked."""
    by_step: int | None = None
    """First finding at this step or before."""
    warns: bool = False
    """A warning must come before the first step is closed."""
    dtypes: dict[str, str] | None = None
    mode: str = "resync"

    @property
    def verdicts(self) -> tuple[str, ...]:
        return (self.verdict,) if isinstance(self.verdict, str) else self.verdict

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,) if isinstance(self.kind, str) else self.kind


def case(number, name, verdict, run, dtypes=BF16, **rest):
    return Case(number, name, verdict, run, dtypes=dtypes, **rest)


CASES = (
    # -- 1 numerics
    case("1.1", "bf16 floor, long rows, sequence ESS of the total 0.05", "HEALTHY",
         engine_runs.bf16_floor, sends=NOTHING),
    case("1.2", "the trainer disagrees with itself at equal weights: 60 % of ratios outside [0.9, 1.1]", "ENGINE",
         engine_runs.trainer_against_itself, kind="trainer_noise", never=("LAG",), sends=NOTHING),
    case("1.5", "fp32 floor, then the head in fp32 on one side only", "ENGINE", engine_runs.one_sided_head,
         dtypes=FP32, kind=("changed", "level"), never=("STALE_ENGINE", "LAG")),
    case("1.6", "equal at step 0, mean |x| 0.011 to 0.036 by step 30, 1.09 at 96", "ENGINE", engine_runs.slow_drift,
         kind=("drift", "drift_or_undelivered"), never=("LAG",), by_step=30),
    case("1.9", "one of two engines is far off from step 0 on", "ENGINE", engine_runs.engine_off_from_the_start,
         dtypes=FP16, kind="level", sends=NOTHING, never=("LAG", "STALE_ENGINE"), by_step=1),
    case("1.10", "on-policy in async clothes: high at step 0 already and rising, no lag", "ENGINE",
         engine_runs.high_and_rising, never=("LAG",), by_step=1),
    case("1.11", "wrong rotary angles: rms 0.35, up to 44 nats, on step 0", "ENGINE", engine_runs.wrong_angles,
         sends=ABORT, never=("LAG",), by_step=0),
    case("1.12", "rare tokens after tool output", "ENGINE", engine_runs.rare_tokens_after_tools,
         kind="low_probability", never=("LAG", "STALE_ENGINE")),
    # -- 2 lag
    case("2.1", "async, three versions behind, the policy moves faster and faster", "LAG",
         policy_runs.three_versions_behind, never=("STALE_ENGINE", "ENGINE")),
    case("2.2", "age 3 that the policy bears; entropy falls through its stop", "LEARNING",
         policy_runs.entropy_stop_at_age_3, kind="entropy", never=("LAG", "STALE_ENGINE"), sends=NOTHING),
    case("2.6", "trainer -2, engine -91 on a few tokens", ("DATA", "LAG"), policy_runs.impossible_tokens),
    case("2.7", "ratio exactly 1 at age > 0: `old` is the current stream", "UNWIRED", policy_runs.ratio_of_one,
         kind="lag_always_zero", never=FAULTS, sends=NOTHING),
    case("2.9", "after a resume the engine still holds the first checkpoint", "STALE_ENGINE",
         policy_runs.resumed_on_old_weights, kind="after_resume", sends=RESYNC, by_step=121,
         never=("LAG", "ENGINE", "DATA")),
    case("2.10", "age 3 but the policy never moved", "LEARNING",
         policy_runs.frozen_at_age_3, kind="frozen", never=FAULTS,
         sends=NOTHING),
    # -- 3 plumbing
    case("3.1", "responses paired with wrong prompts, a growing share, lr 0", "DATA", data_runs.wrong_prompts,
         kind="wrong_pairing", sends=ABORT, never=("LAG", "STALE_ENGINE")),
    case("3.4a", "shift by one behind a fused head", "DATA",
         data_runs.shift_by_one, kind="offset", sends=ABORT, by_step=0,
         never=("LAG", "STALE_ENGINE")),
    case("3.4b", "packing k samples yields L - k logprobs", "DATA",
         data_runs.short_by_three, kind="mis_sized", by_step=1),
    case("3.5", "old one place left, and raw against temperature", "DATA", data_runs.shifted_and_raw, kind="offset",
         also=("TRANSFORM",), never=("STALE_ENGINE",)),
    case("3.7", "a hand-made end token with logprob exactly 0", "DATA", data_runs.hand_made_end, kind="last_token",
         never=("LAG", "STALE_ENGINE", "ENGINE")),
    case("3.8", "second end id: 97 % counted as cut although finished", "DATA", data_runs.second_end_id,
         kind="finish_reason", never=("LEARNING", "LAG")),
    case("3.9", "retokenised: from one token on the rest of the row is another text", "DATA", data_runs.broken_prefix,
         kind="broken_prefix", never=("LAG", "STALE_ENGINE")),
    case("3.10", "tool output inside the mask", "DATA", data_runs.tool_output_in_mask, kind="masked_span",
         never=("LAG", "STALE_ENGINE")),
    case("3.11", "a subset of requests comes with all logprobs 0", ("DATA", "ENGINE"), data_runs.zero_rows,
         kind="exact_zeros", never=("LAG", "STALE_ENGINE")),
    case("3.13", "near-certain tokens come as NaN, entropy is nearly 0", "DATA", data_runs.nan_where_certain,
         kind="non_finite", also=("LEARNING",), never=("LAG", "STALE_ENGINE")),
    case("3.14", "after a resume rows come twice", "DATA", data_runs.doubled_after_resume, kind="duplicate"),
    case("3.15a", "the version counts calls of the update, not updates: tags from the future", "LABEL",
         data_runs.tags_from_the_future, kind="future_version", never=("LAG", "STALE_ENGINE")),
    case("3.15b", "rows tagged one version too old fit the weights after it", "LABEL", data_runs.tags_too_old,
         kind="other_version", never=("STALE_ENGINE", "LAG")),
    case("3.18", "812 logprobs for a response of 456 tokens", "DATA", data_runs.too_many_logprobs, kind="mis_sized"),
    case("3.19", "prompts retokenised on the way: the hash ids never meet", "DATA", data_runs.prompts_differ,
         kind="unmatched"),
    # -- 4 transforms
    case("4.1", "engine samples at 0.6, trainer scores at 1", "TRANSFORM", data_runs.temperature_on_the_engine,
         kind="temperature", by_step=1, never=("LAG", "STALE_ENGINE", "ENGINE")),
    case("4.2a", "top-p 0.8 renormalised by the engine", "TRANSFORM", data_runs.top_p, kind="kept_mass",
         never=("LAG", "STALE_ENGINE", "ENGINE")),
    case("4.2b", "top-k 20 renormalised by the engine", "TRANSFORM", data_runs.top_k, kind="kept_mass",
         never=("LAG", "STALE_ENGINE", "ENGINE")),
    case("4.3", "raw logprobs divided by the temperature", "TRANSFORM", data_runs.divided_by_temperature,
         kind="temperature", never=("LAG", "STALE_ENGINE", "ENGINE")),
    case("4.5", "engine reports raw logprobs of tokens it sampled at 0.6", "TRANSFORM", data_runs.raw_against_processed,
         kind=("raw_vs_processed", "temperature"), never=("LAG", "STALE_ENGINE", "ENGINE")),
    case("4.6", "raw logprobs at temperature 0.7 in the settings: said before any data", "BLIND",
         data_runs.settings_only, warns=True),
    # -- 5 stale cache, failed sync
    case("5.1", "adapter never delivered: labels 0 to 1, the checksum never changes", "STALE_ENGINE",
         engine_runs.never_delivered, kind="never_delivered", sends=RESYNC | ABORT, never=("LAG",)),
    case("5.3", "sleep dropped the weights: off at the first step after a weight change", "STALE_ENGINE",
         engine_runs.dropped_by_sleep, sends=RESYNC, by_step=6, never=("LAG", "DATA", "ENGINE")),
    case("5.5", "decode cache not refreshed: right at step 1, then drifts; a reset heals", "STALE_ENGINE",
         engine_runs.stale_decode_cache, sends=RESYNC, never=("LAG", "DATA")),
    case("5.6", "captured graph keeps old addresses: step 0 fine, step 1 garbage", ("STALE_ENGINE", "ENGINE", "DATA"),
         engine_runs.garbage_after_first_update, sends=ABORT, by_step=1, never=("LAG",)),
    case("5.7a", "an engine release with mismatch KL 0.19", "ENGINE", engine_runs.bad_release, by_step=1,
         never=("LAG", "STALE_ENGINE", "DATA")),
    case("5.7b", "its successor with 0.024", "HEALTHY", engine_runs.good_release, sends=NOTHING),
    case("5.8", "adapter loaded under a random name and never used", "STALE_ENGINE", engine_runs.adapter_unused,
         sends=RESYNC | ABORT, never=("LAG",)),
    case("5.10", "reload returns cached weights", "STALE_ENGINE", engine_runs.cached_reload, kind="never_delivered",
         sends=RESYNC | ABORT, never=("LAG",)),
    # -- 6 MoE and quantisation
    case("6.2a", "fp8 tensorwise: KL 0.010 to 0.031", "ENGINE", engine_runs.fp8_tensorwise, dtypes=FP8, kind="drift",
         never=("LAG", "STALE_ENGINE")),
    case("6.2b", "bf16: KL 0.0063 to 0.0089", "HEALTHY", engine_runs.bf16_slow, sends=NOTHING),
    case("6.2c", "mxfp8: flat", "HEALTHY", engine_runs.mxfp8_flat, dtypes=FP8, sends=NOTHING),
    case("6.4", "bad steps come and go from update 3 on", "ENGINE", engine_runs.intermittent, dtypes=MOE,
         never=("LAG", "STALE_ENGINE")),
    case("6.5", "router choices differ: the tail grows, the median stays", "ENGINE",
         engine_runs.router_tail, dtypes=MOE,
         kind="tail", never=("LAG", "STALE_ENGINE")),
    case("6.6", "merging the adapter rounds updates away, checksums do change", "ENGINE", engine_runs.rounded_away,
         kind=("drift", "drift_or_undelivered"), sends=RESYNC, never=("LAG",)),
    # -- 7 collapse with the mismatch flat
    case("7.1", "98 % cut at the limit, 2 of 128 solved, min ESS 0.989", "LEARNING", policy_runs.all_truncated,
         kind=("truncation", "length"), never=FAULTS, sends=NOTHING),
    case("7.4", "entropy to 0.05, longer outputs, accuracy down; KL only doubled", "LEARNING",
         policy_runs.entropy_collapse, kind="entropy", never=FAULTS, sends=NOTHING),
    case("7.5", "reward creeps from 0.35 to 0.40, KL flat, staleness 0", ("HEALTHY", "LEARNING"),
         policy_runs.barely_moving, never=FAULTS, sends=NOTHING),
    case("7.6", "template collapse that no scalar shows", "HEALTHY", policy_runs.template_collapse, sends=NOTHING),
    # -- 8 false alarms
    case("8.1", "placeholder 0 on masked tool tokens", "HEALTHY", policy_runs.masked_zeros, sends=NOTHING),
    case("8.3a", "isolated spikes that fall back at once", "HEALTHY", policy_runs.spikes, sends=NOTHING),
    case("8.3b", "a rising average", "ENGINE", policy_runs.rising_average, never=("LAG",)),
    case("8.4", "'0 of N loaded' in the log, weights fine", "HEALTHY", policy_runs.none_loaded_log, sends=NOTHING),
    case("8.5", "9.4 % of ratios outside [0.9, 1.1] at equal weights", "HEALTHY",
         policy_runs.nine_percent_out, sends=NOTHING),
    case("8.6a", "the stack's metric is wrong, the run is not", "HEALTHY", policy_runs.wrong_metric, sends=NOTHING),
    case("8.6b", "the signed mean is 0 and hides a broken engine", "ENGINE", policy_runs.hidden_by_sign,
         never=("LAG", "STALE_ENGINE")),
    case("8.7", "weights go out on every fourth step only", "HEALTHY", policy_runs.every_fourth_step, sends=NOTHING),
    case("8.8", "a clip range of 1e-5, below the noise", "BLIND", policy_runs.clip_below_noise, warns=True),
    case("8.9", "staleness 3 offered, 0.5 trained", "HEALTHY", policy_runs.offered_staleness, sends=NOTHING),
    case("8.11", "five rollouts of a prompt share leading tokens bit for bit", "HEALTHY", policy_runs.shared_prefixes,
         sends=NOTHING),
)  # fmt: skip

EXCLUDED = {
    "6.7": "a counter-view (sampling noise drives the collapse), not a run: no numbers to make one from",
    "6.8": "a good pair of runs by its title, but its numbers were not seen",
    "7.7": "closed without a cause or a number",
}

NUMBERS = [
    f"{chapter}.{number}"
    for chapter, numbers in {
        1: (1, 2, 5, 6, 9, 10, 11, 12),
        2: (1, 2, 6, 7, 9, 10),
        3: (1, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 18, 19),
        4: (1, 2, 3, 5, 6),
        5: (1, 3, 5, 6, 7, 8, 10),
        6: (2, 4, 5, 6, 7, 8),
        7: (1, 4, 5, 6, 7),
        8: (1, 3, 4, 5, 6, 7, 8, 9, 11),
    }.items()
    for number in numbers
]
"""All 59."""

NOT_BUILT: dict[str, dict[str, str]] = {"verdict": {}, "kind": {}, "conduct": {}, "quiet": {}}
"""What is asked -> case -> the rule that is missing. verdict; kind; conduct = also, never, sends, by_step, warns;
quiet = no finding at all."""
