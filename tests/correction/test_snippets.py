"""The snippets a newcomer copies: the README's and the package's own run as they stand."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from dlc_sentinel import correction

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = {
    "README": next(code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "dlc_loss(" in code),
    "docstring": textwrap.dedent("\n".join(re.findall(r"^(?:    .*)?$", correction.__doc__, re.MULTILINE))),
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_snippet_runs_alone_and_trains_with_centred_scores(name, capsys):
    torch.manual_seed(0)
    names = {}

    exec(SNIPPETS[name], names)

    out, head = names["out"], names.get("lm_head", names.get("head"))
    assert head.weight.grad.abs().sum() > 0 and out.loss.isfinite()
    assert "'dlc/centring': 1.0" in capsys.readouterr().out


def test_the_readme_names_every_value_of_the_centring_metric_and_every_correction():
    from dlc_sentinel.maths.corrections import CORRECTIONS

    section = README.partition("## Train with the DLC loss")[2].partition("\n## ")[0]

    assert {float(value) for value in re.findall(r"\b(\d(?:\.\d)?) =", section.partition("`centring`")[2])} == set(
        correction.CENTRING_CODES.values()
    )
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {*CORRECTIONS, "resync"} - {"none"}
    assert max(len(code.splitlines()) for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)) <= 14
