"""The time and the modules of ``import penstock`` in a fresh process; and the public names."""

import inspect
import subprocess
import sys

import penstock as ps

FRESH = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import penstock
print(time.process_time() - start, *sorted(name for name in set(sys.modules) - before))
"""
HEAVY = {"triton", "numba", "matplotlib", "transformers", "typer", "rich", "fla", "numpy"}


def fresh_import():
    """Seconds on a CPU beyond torch, which other processes do not add to, and the modules imported."""
    done = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", FRESH], capture_output=True, text=True, check=True)
    seconds, *modules = done.stdout.split()
    return float(seconds), modules


def test_import_is_fast_and_light():
    """Under half a second on a CPU (in one of three: files may not be in memory yet), and nothing optional."""
    for _ in range(3):
        seconds, modules = fresh_import()
        if seconds < 0.5:
            break
    assert seconds < 0.5
    assert "penstock.recurrence.functional" in modules
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    upper = ("cli", "demo", "bench", "tune", "verify", "training", "compat", "models", "layers")
    assert not {name for name in modules if name.startswith(tuple(f"penstock.{folder}" for folder in upper))}


def test_public_names():
    names = [
        "DeviceError",
        "DtypeError",
        "ImplementationRefused",
        "InvalidArgument",
        "MatrixSummary",
        "PenstockError",
        "RangeError",
        "Result",
        "ShapeError",
        "Summary",
        "advance",
        "checks",
        "decode_step",
        "delta_rule",
        "distributed",
        "dplr",
        "explain",
        "gated_delta_rule",
        "gla",
        "implementations",
        "kda",
        "linear_attention",
        "retention",
        "rwkv5",
        "rwkv6",
        "rwkv7",
        "simple_gla",
        "softmax_attention",
        "summary",
    ]
    assert sorted(ps.__all__) == names
    assert all(hasattr(ps, name) for name in names)
    assert ps.Result._fields == ("output", "final_state")


OVER_SEQUENCES = "scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, reverse=False, context=None, impl='auto'"
KEYS = "use_qk_l2norm=False, beta_logits=False, allow_neg_eigval=False"
OF_DELTA = "scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, context=None, impl='auto'"
RAW = "A_log=None, dt_bias=None, raw_decay=False, lower_bound=None"
IN_PLACE = f"beta=None, a=None, b=None, {RAW}, {KEYS}, scale=None, impl='auto'"
SIGNATURES = {
    "linear_attention": f"q, k, v, *, feature_map=None, normalize=False, {OVER_SEQUENCES}",
    "retention": f"q, k, v, *, g=None, {OVER_SEQUENCES}",
    "simple_gla": f"q, k, v, g, *, {OVER_SEQUENCES}",
    "gla": f"q, k, v, g, *, {OVER_SEQUENCES}",
    "rwkv5": f"r, k, v, w, u, *, {OVER_SEQUENCES}",
    "rwkv6": f"r, k, v, w, u, *, {OVER_SEQUENCES}",
    "delta_rule": f"q, k, v, beta, *, {KEYS}, {OF_DELTA}",
    "gated_delta_rule": f"q, k, v, g, beta, *, A_log=None, dt_bias=None, {KEYS}, {OF_DELTA}",
    "kda": f"q, k, v, g, beta, *, A_log=None, dt_bias=None, lower_bound=None, {KEYS}, {OF_DELTA}",
    "rwkv7": f"r, w, k, v, a, b, *, raw_decay=False, lower_bound=None, {OF_DELTA}",
    "dplr": f"q, k, v, a, b, g, *, lower_bound=None, {OF_DELTA}",
    "decode_step": f"variant, q, k, v, g=None, u=None, *, state, slots=None, {IN_PLACE}",
    "advance": f"variant, q, k, v, g=None, u=None, *, state, slots=None, cu_seqlens=None, {IN_PLACE}",
    "softmax_attention": "q, k, v, *, causal=True, scale=None, cu_seqlens=None, cu_seqlens_k=None, window=None, "
    "return_lse=False, impl='auto'",
    "summary": "variant, k, v, g=None, *, initial_state=None, scale=1.0, reverse=False, adjoint=False, "
    f"beta=None, a=None, b=None, {RAW}, {KEYS}, impl='auto'",
    "explain": "function, *args, **kwargs",
    "implementations": "function='gla'",
}


def test_signatures():
    """Names, order, defaults, and what is keyword-only."""
    for name, wanted in SIGNATURES.items():
        parameters = inspect.signature(getattr(ps, name)).parameters.values()
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        assert str(inspect.Signature(bare)) == f"({wanted})"


def test_exception_tree():
    tree = {
        name: [base.__name__ for base in getattr(ps, name).__bases__]
        for name in ps.__all__
        if name.endswith(("Error", "Argument", "Refused"))
    }
    assert tree == {
        "PenstockError": ["Exception"],
        "InvalidArgument": ["PenstockError", "ValueError"],
        "ShapeError": ["InvalidArgument"],
        "DtypeError": ["InvalidArgument", "TypeError"],
        "DeviceError": ["InvalidArgument"],
        "RangeError": ["InvalidArgument"],
        "ImplementationRefused": ["PenstockError", "RuntimeError"],
    }
