"""Every form for which this GPU has code, of families and of chains of layers, on its examples. Run with ``pytest -m gpu``."""

import pytest
import torch

from penstock.call.declaration import FLOATS
from penstock.call.families import trials
from penstock.verify import chains, forms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("trial", trials(), ids=lambda trial: trial.operator.name)
def test_examples_equal_the_oracle(trial):
    """As ``penstock check`` compares them: a form that did not run is a failure."""
    found = list(forms.findings(trial, FLOATS, "cuda"))
    assert found
    assert not [(one.form, one.result, one.reason, one.error, one.budget) for one in found if one.failed]


@pytest.mark.parametrize("chain", chains.chains(), ids=lambda chain: chain.name)
def test_examples_of_chains_equal_the_formula(chain):
    """The same."""
    found = list(chains.findings(chain, FLOATS, "cuda"))
    assert found
    assert not [(one.form, one.dtype, one.result, one.reason, one.error, one.budget) for one in found if one.failed]
