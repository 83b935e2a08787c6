"""What to do about a finding, in a sentence or two: (verdict, kind) -> text. Plain data."""

from __future__ import annotations

from collections.abc import Mapping

ADVICE: Mapping[tuple[str, str], str] = {
    ("LAG", "old_weights"): (
        "Sync the generator now (RESYNC); if this repeats every few steps, sync on a period or lower the learning rate."
    ),
    ("LAG", "feedback"): ("Lag per unit of age grows from sync to sync: sync now, then lower the learning rate."),
    ("LAG", "epochs"): (
        "The lag is made inside the step: fewer epochs or mini-batches per batch, or a lower learning rate."
    ),
    ("LAG", "queue"): (
        "The engine is fresh, the rows are old: drop the stale rows (RESYNC drop_stale) or shorten the queue."
    ),
    ("LAG", "hopeless_queue"): (
        "The queue is deeper than the policy can bear: shorten it or lower the learning rate; no RESYNC helps."
    ),
    ("STALE_ENGINE", "never_delivered"): (
        "The payload of the newest sync was that of an older version: the engine does not hold the weights "
        "its label names. Fix the weight sync before anything else."
    ),
    ("STALE_ENGINE", "stale_or_drift"): (
        "Rows labelled current drift from the trainer. One RESYNC with a cache reset tells stale weights from "
        "engine drift; compare one parameter's checksum on both sides."
    ),
    ("ENGINE", "level"): (
        "Same weights, different numbers: compare dtypes (fp32 head on both sides?), kernels, quantisation "
        "and sampling settings of engine and trainer; a sync will not help."
    ),
    ("ENGINE", "drift_or_undelivered"): (
        "A RESYNC changed nothing: the engine's numerics drift, or weights still do not arrive. Compare one "
        "parameter's checksum on both sides: equal = drift of numerics, else fix the sync."
    ),
    ("ENGINE", "changed"): (
        "From this step on the engine's numbers are of another kind at equal weights: was an engine restarted "
        "with another dtype, quantisation or kernel? What is calibrated is learnt anew; a sync will not help."
    ),
    ("DATA", "streams_disagree"): (
        "The two streams do not belong to the same tokens: look for a shift by one, swapped rows or a wrong mask."
    ),
    ("DATA", "non_finite"): (
        "The engine or trainer writes NaN or infinity: look at near-certain tokens and dtype overflow."
    ),
    ("DATA", "no_engine"): (
        "Whole rows come without engine logprobs (NaN): leave rows that nobody generated (demonstrations) out of "
        "hook.train; where the engine did generate them, it wrote NaN for every token: look at overflow in its dtype."
    ),
    ("DATA", "positive"): (
        "Some tokens carry a value above 0, which no logprob is: a fill-in (1.0), a count or a logit at one place. "
        "Mask them, and see which tokens they are."
    ),
    ("DATA", "placeholder"): (
        "Fill-in values (-9999 ...) reached the loss: mask them; the engine had no logprob there."
    ),
    ("DATA", "mis_sized"): (
        "Engine and trainer disagree on a response's length: is the hook placed before stop-token trimming?"
    ),
    ("DATA", "duplicate"): ("The same sequence was sent twice in one update: check the sampler after a resume."),
    ("DATA", "out_of_order"): ("Chunks of a sequence arrived in the wrong order or with a hole: frames were lost."),
    ("DATA", "unmatched"): (
        "Trainer rows have no rollout, or another one: do both sides use the same ids? Leave rows that nobody "
        "generated (demonstrations) out of hook.train."
    ),
    ("DATA", "restarted_version"): (
        "Versions went back: the run was restarted under its old name; use a new DLC_SENTINEL_RUN."
    ),
    ("UNWIRED", "total_always_zero"): (
        "The engine's logprobs equal the trainer's bit by bit although the rows are old: one side is a copy of the "
        "other, or neither has moved yet (a critic's warm-up). Send the logprobs that the engine returned when it "
        "sampled."
    ),
    ("UNWIRED", "lag_always_zero"): (
        "Lag is exactly 0 although the rows are old: `old` is a copy of the current logprobs (recomputed or "
        "detached), not the generator's policy; or no weight has moved yet (a critic's warm-up: send lr or grad_norm). "
        "Send old_is='reused', or score at the generator's weights."
    ),
    ("BLIND", "unusable_tokens"): (
        "Fewer than half of the tokens sent could be used: the causes are in the evidence; `dlc-sentinel doctor` helps."
    ),
    ("BLIND", "mixed_basis"): (
        "Lag and discrepancy cannot be told apart: the stack keeps no trainer logprobs at the generator's "
        "weights. Send `old` with old_version, or score at a kept snapshot."
    ),
    ("BLIND", "silent"): (
        "Every trainer fell silent without saying goodbye: is the job dead, or stopped in a debugger?"
    ),
    ("BLIND", "no_rows_of_acknowledged_version"): (
        "The engine acknowledged new weights but no row generated by them was trained: is the queue consumed?"
    ),
    ("DATA", "offset"): (
        "One stream is shifted: engine[t] belongs to trainer[t + offset]. Look at the gather of labels (fused "
        "heads), at prompt tokens counted as response, and at a missing first or last token."
    ),
    ("DATA", "wrong_pairing"): (
        "Rows of one side meet rows of the other that are not theirs: compare ids, look at every sort, filter "
        "and index between the engine and the loss."
    ),
    ("DATA", "broken_prefix"): (
        "Rows fit up to a token and not after it: was text decoded and tokenised again between turns? Pass "
        "token ids on, and leave such rows out."
    ),
    ("DATA", "exact_zeros"): (
        "One stream holds logprobs of exactly 0 where the other is far from certain: fill-in values are "
        "averaged as data. Mask them; see whether they are one kind of request (speculative decoding, tools)."
    ),
    ("DATA", "last_token"): (
        "The last token is off on many rows: an end token appended by hand has no logprob. Mask it, or let "
        "the engine generate it."
    ),
    ("DATA", "first_token"): (
        "The first token is off on many rows: is the boundary of the prompt the same on both sides?"
    ),
    ("DATA", "one_place"): (
        "At one place in the response far more tokens are off than anywhere else: look for a boundary there (chunk, "
        "packing, cache block)."
    ),
    ("DATA", "wild_values"): (
        "Some tokens are more than 20 nats apart: one side's value is a fill-in, an underflow or of another "
        "token. Mask them; exp() of such a ratio overflows in the loss."
    ),
    ("DATA", "chunk_edge"): (
        "Tokens at multiples of one number are off: a chunk, block or pack boundary of one side drops its "
        "context or its last logit."
    ),
    ("DATA", "turn_edge"): (
        "The first tokens after masked spans are off: the two sides see different text between turns (chat "
        "template, tool output)."
    ),
    ("DATA", "masked_span"): (
        "Tokens that are off come in runs: tool output, prompt text or padding seems to be inside the mask."
    ),
    ("DATA", "finish_reason"): (
        "Rows are counted as cut off although the engine says they finished: a second end token is not known "
        "to the trainer."
    ),
    ("TRANSFORM", "logits"): (
        "Values above 0 are no logprobs: one side sends logits or probabilities. Take log_softmax, check logprobs_mode."
    ),
    ("TRANSFORM", "kept_mass"): (
        "The engine samples from a cut distribution (top-p, top-k, min-p) and the trainer scores on all of "
        "it: train without the cut, or renormalise the trainer's logprobs over the kept tokens."
    ),
    ("TRANSFORM", "temperature"): (
        "One side's logprobs are at another temperature: score both at the one that sampled (`temperature` in "
        "the evidence is trainer over engine). Do not divide logprobs by T: divide logits."
    ),
    ("TRANSFORM", "unreported"): (
        "The engine samples at this temperature or cut but reports logprobs of the whole distribution at 1: neither "
        "stream is of the policy that sampled, so no ratio here is right. Set logprobs_mode=processed_logprobs and "
        "score alike in the trainer, or sample at temperature 1 without a cut."
    ),
    ("LABEL", "future_version"): (
        "Rows carry versions newer than the trainer's: does the tag count calls instead of updates? Stamp the "
        "version in the engine when the token is generated."
    ),
    ("LABEL", "other_version"): (
        "Rows fit the trainer's present weights and not those their tag names: the tag is read too early. "
        "Stamp the version in the engine when the token is generated."
    ),
    ("LABEL", "some_rows"): (
        "Some rows of one version are far from it while the others are at the floor: the tag is read when a "
        "request ends, or twice. Stamp it in the engine when the token is generated."
    ),
    ("LEARNING", "entropy"): (
        "The policy is becoming deterministic although engine and trainer agree: raise the entropy bonus or "
        "the clip's upper bound, lower the learning rate. No sync helps."
    ),
    ("LEARNING", "truncation"): (
        "Most responses are cut at the limit: the reward no longer sees their end. Raise the limit, penalise "
        "length, or check that the end token is recognised."
    ),
    ("LEARNING", "entropy_surge"): (
        "The policy is becoming random and its reward falls: lower the learning rate or the entropy bonus, look at "
        "the gradient norm and the clip; go back to a checkpoint from before. No sync helps."
    ),
    ("LEARNING", "length"): (
        "Responses are three times as long as at the start, and the reward has not gained by it: look at what it "
        "pays for."
    ),
    ("LEARNING", "length_collapse"): (
        "Responses are a third as long as at the start and the reward falls: look at a penalty on length, at how the "
        "loss is averaged over tokens, and whether the end token is rewarded."
    ),
    ("LEARNING", "reward"): (
        "The reward has lost half of its peak, or of what it had gained, while engine and trainer agree: look at the "
        "learning rate, the reward function and the data, not at the engine."
    ),
    ("LEARNING", "frozen"): (
        "No gradient reaches the policy: are the rewards of each group equal (all tasks solved, or none), is "
        "everything masked, are the weights frozen?"
    ),
    ("LEARNING", "non_finite_gradient"): (
        "The gradient is NaN or infinite at most steps: stop, and look for the first NaN (a loss of an empty mask, "
        "a log of 0, an overflow in fp16). Where the weights hold NaN, go back to a checkpoint from before."
    ),
    ("ENGINE", "drift"): (
        "Engine and trainer drift apart at equal weights, slowly: compare dtypes, kernels and quantised "
        "scales after a sync; a sync alone will not help."
    ),
    ("ENGINE", "low_probability"): (
        "Only rare tokens differ: usual for low precision, harmful when it grows. Raise the precision of the "
        "head on both sides."
    ),
    ("ENGINE", "tail"): (
        "A few tokens differ by much while the median stays: typical for experts chosen differently. Replay "
        "the routing, or mask such tokens."
    ),
    ("ENGINE", "position"): (
        "The difference grows along the response: look at position encoding, at cache precision and at "
        "long-context kernels."
    ),
    ("ENGINE", "quantised"): (
        "The engine's logprobs lie on a coarse grid: they are rounded on their way (bf16 logits, rounded "
        "text). Carry them as float32."
    ),
    ("ENGINE", "replica"): (
        "One replica differs from the trainer and the others do not: restart it with the others' dtype, "
        "kernels and weights."
    ),
    ("ENGINE", "long_rows"): (
        "Only rows beyond some length are off, all of their tokens: a long-context rope factor, a sliding window or "
        "another kernel switches in by the length of the request, on one side only."
    ),
    ("ENGINE", "some_requests"): (
        "Some requests are off and the others are not, and older weights do not explain it (off since the first step, "
        "or after a sync): look for what they share: replica, batch shape, cache hit, adapter."
    ),
    ("ENGINE", "prompt_keyed"): (
        "All rows of some prompts differ: look at what they share (images, a cached prefix, an adapter)."
    ),
    ("ENGINE", "trainer_noise"): (
        "The trainer disagrees with itself at equal weights: other micro-batches, other kernels. Use the same "
        "batch layout for old and current logprobs."
    ),
    ("STALE_ENGINE", "some_syncs"): (
        "The engine falls behind and catches up again under labels that move each step: some syncs do not reach it. "
        "Let every label name the version that was loaded, and sync at every step that a label claims."
    ),
    ("STALE_ENGINE", "one_replica"): (
        "One replica's rows are far from the trainer: did the last sync reach it? One RESYNC with a cache "
        "reset tells; else compare a parameter's checksum on that replica."
    ),
    ("STALE_ENGINE", "cached_prefix"): (
        "Only rows whose prompts came from the prefix cache are off: it holds what older weights computed. Reset the "
        "prefix cache with every sync; one RESYNC with a cache reset tells."
    ),
    ("STALE_ENGINE", "stale_kv"): (
        "Weights change in flight and the cache of the old ones is kept: the tokens after it are of neither policy. "
        "Reset the cache with the sync and prefill again, or let running requests end first."
    ),
    ("STALE_ENGINE", "after_resume"): (
        "Right after a resume the engine does not hold the checkpoint's weights: sync before the first step."
    ),
}
