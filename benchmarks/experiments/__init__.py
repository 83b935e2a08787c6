"""Do the claims behind the threshold hold? Four testbeds, one command each: `python -m benchmarks.experiments NAME`.

    a  a tabular tree, 5 to 13 tokens, every number exact by enumeration          worlds, loop
    b  a trap of 63 states whose collapse the generator's samples do not show     worlds.trap
    c  a tiny transformer with a bf16 engine, losses of dlc_sentinel.correction   job, tiny, tiny_kl
    d  a Markov chain, 64 to 1024 tokens, exact by recursion                      worlds, loop
    page  figures of all rows, pictures, docs/claims.md                           judge, claims, frontier, picture, page

Every run ends as one line of JSON in DIR; a second call goes on from there.

Written down before any result was looked at:

* **On-policy** = samples from the trainer's own policy, in the trainer's numerics: no lag, no discrepancy. In C the
  engine keeps the demo's first 4 syncs in every run; they are not counted.
* **KL ratio** at step k = mean over reference seeds j of KL(method_k || on_j,k), over the mean of KL(on_i,k ||
  on_j,k) over ordered pairs i != j. Same step, same start, same world; methods and references have different seeds.
  Full: over prefixes of the first argument, whole responses. Prefix: both KLs over prefixes of the method's own
  generator. In C over fresh samples of the first argument, the KL of each prefix in closed form.
* **Warm-up** = the first 10 % of steps; nothing is judged there.
* **Failure** = first step after the warm-up from which the full KL ratio stays above 2 for 5 evaluations (in A, B, D
  a step each; in C every 10th step, and 2 evaluations). **For good** = from which it stays above 2 to the end.
* **Crossing** of ESS_h = first step at which the population ESS_h of the lag ratio under the generator is below 1/2
  (in C the batch's). Difference = failure minus crossing. A run that never fails or never crosses is counted, not
  dropped.
* **Rules** look at the batch's ESS_h (dlc_sentinel.maths.ess) after each update of a batch and sync the generator
  when it is below 1/2. **Fixed periods** have, run by run, as many syncs as the rule they are held against, evenly
  spaced.
* **Within the band** = mean over seeds of the full KL ratio <= 2 at every judged step, world by world.
* Intervals: 95 % bootstrap over runs, 4000 draws.
* (1) holds if in every never-synced run of C the discrepancy's rms in the last quarter of the judged steps is within
  a factor 2 of that in the first, and the lag's is not; and in every run synced at each step, where the engine's
  weights do change, the discrepancy's is too. (A never-synced engine keeps its weights, so there the first half is
  easy.)
* (2) holds if the middle half of the differences at h = 1, over the IS and TIS runs of A and D, holds 0 and is within
  10 % of the run's length. (3) holds if DLC with the default rule is within the band in every world of A and D. (4)
  holds if the unsynced arms of B end (last 10 % of steps, means over seeds) with prefix ratio < 2, full ratio > 2 and
  less than half of their peak return, and the default rule's do not.
* (5) The default horizon that the data favour = the smallest h whose rule keeps DLC within the band in every world of
  D of 256 tokens or more; if none does, that is said. A rule beats its fixed period where the interval of the paired
  log ratio of their mean KL ratios is below 0.
* Arms: arms (TABULAR, ABLATION, frontier), job.ARMS. Seeds: methods 100 upwards, references 0 upwards. Learning rates
  and worlds were fixed on pilot seeds 900 upwards by one criterion: the on-policy run learns and the uncorrected,
  never-synced one does not keep up. B is a counterexample: on pilot seeds it was built until corrected runs without
  syncs collapsed and the prefix KL did not show it. Its runs confirm a construction, no more; what was open there is
  whether a rule prevents it.

Later than the first runs, but before a look at what they say: criterion 5 and the synced half of criterion 1. Later
than the first results: the words "in part" of the page's table, and that claim 5 counts pairs there.

Axes of this package: S runs (seeds), R reference runs, B rows, T tokens, n states, V actions, K parameters.
"""
