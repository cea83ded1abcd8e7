"""The native library of aarch64 in QEMU, against the reference. docs/versions.md says what it needs."""

import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

TAG = "manylinux_2_17_aarch64"
QEMU, ROOT = shutil.which("qemu-aarch64"), Path(os.environ.get("PENSTOCK_AARCH64", "/nowhere"))
SAMPLE = """
import torch, penstock as ps
from torch.nn.functional import normalize

draw = torch.randn
torch.manual_seed(0)
B, T, H, K, V = 1, 40, 2, 20, 12
q, k, v, g, u = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), -draw(B, T, H, K).abs(), draw(H, K)
key, beta = normalize(k, dim=-1), torch.rand(B, T, H)
calls = {
    "gla": (q, k, v, g), "rwkv6": (q, k, v, g, u), "retention": (q, k, v),
    "kda": (q, key, v, g, beta), "delta_rule": (q, key, v, beta), "dplr": (q, k, v, -key, key * beta[..., None], g),
}

def distance(x, y):
    return ((x.double() - y).norm() / y.norm()).item()

def results(name, impl, dtype):
    inputs = [x.to(dtype, copy=True).requires_grad_() for x in calls[name]]
    made = getattr(ps, name)(*inputs, output_final_state=True, impl=impl)
    return [made.output, made.final_state, *torch.autograd.grad(made.output.sum() + made.final_state.square().sum(), inputs)]

for name in calls:
    pairs = zip(results(name, "cpu", torch.float32), results(name, "reference", torch.float64))
    print(name, max(distance(x, y) for x, y in pairs), flush=True)
state = draw(3, H, K, V)
token = [draw(3, H, K), draw(3, H, K), draw(3, H, V), -draw(3, H, K).abs()]
exact_state, exact_token = state.double(), [x.double() for x in token]
output = ps.decode_step("gla", *token, state=state, impl="cpu")
exact = ps.decode_step("gla", *exact_token, state=exact_state, impl="reference")
print("decode_step", max(distance(output, exact), distance(state, exact_state)))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(QEMU is None, reason="needs qemu-aarch64: apt-get install qemu-user")
@pytest.mark.skipif(not (ROOT / "usr/bin/python3").exists(), reason="PENSTOCK_AARCH64 names no root with usr/bin/python3: docs/versions.md")
def test_the_library_of_aarch64_computes_what_the_reference_does(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling: pip install -e '.[test]'")
    hatch_build = import_module("hatch_build")
    package = tmp_path / "penstock"
    shutil.copytree(hatch_build.PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    hatch_build.build(package, TAG, package / "cpu" / "native")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'site'}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    command = [str(QEMU), "-L", str(ROOT), str(ROOT / "usr/bin/python3"), "-W", "ignore", "-c", SAMPLE]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = {name: float(error) for name, error in map(str.split, done.stdout.splitlines())}
    assert len(errors) == 7
    assert max(errors.values()) < 1e-6, errors
