"""Products of parts and the inverse of a chunk, under the interpreter, which neither multiplies bfloat16 nor rounds to TF32."""

import pytest

pytest.importorskip("triton")
from delta_products import check_inverse, check_nan, check_parts, check_products

PRECISIONS = ["tf32x3", "ieee"]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("precision", [*PRECISIONS, "tf32"])
def test_products_of_parts(precision):
    check_products(precision, "cpu")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_of_any_bits_stays_nan():
    check_nan("cpu", ["ieee"])


def test_parts_of_products():
    check_parts("cpu")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_inverse_of_a_chunk(precision, in_place):
    check_inverse(precision, in_place, "cpu")
