"""Device functions that all families share, as compiled for an absent GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PRODUCT = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.gpu.tiles import powers_of_two

@triton.jit
def powers_of_a_product(x, y):
    down, up = powers_of_two(tl.load(x) * tl.load(x + 1))
    tl.store(y, down)
    tl.store(y + 1, up)

source = ASTSource(powers_of_a_product, {"x": "*fp32", "y": "*fp32"}, {})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_powers_of_two_have_no_rounding_error_of_their_argument(tmp_path):
    """A fused multiply-add of a product and its negation is the rounding error of the product. The emulator does not fuse."""
    script = tmp_path / "product.py"
    script.write_text(PRODUCT)
    compiler = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=compiler, capture_output=True, text=True, check=False)
    assert ".target sm_90" in done.stdout, done.stderr
    fused = [line for line in done.stdout.splitlines() if "fma.rn.f32" in line]
    assert "neg.f32" not in done.stdout
    assert "sub.f32" not in done.stdout
    assert all("0f00000000" in line for line in fused), fused
