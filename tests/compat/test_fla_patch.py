"""patch() of penstock.compat.fla: on a stand-in package, and on fla itself where it is installed."""

import inspect
import sys
import threading
from types import ModuleType

import pytest
import torch
from delta_loop import delta_loop
from sampling import slow
from token_loop import close, loop
from torch.nn import functional as F

from penstock.compat import fla as ours
from penstock.compat.fla import FUNCTIONS
from penstock.compat.fla_delta import TABLE
from penstock.errors import PenstockError

NAMES = list(FUNCTIONS)
PATCHED = [name for name in NAMES if name != "fused_chunk_gla"]  # which fla 0.6.0 does not implement


def place(name):
    """The module of fla that has a function."""
    return "fla.ops.rwkv7" if name == "fused_mul_recurrent_rwkv7" else "fla.ops"


def theirs(*arguments, **options):
    raise AssertionError("the function of the stand-in was called")


@pytest.fixture
def standin(monkeypatch):
    """A package fla with functions in fla.ops, and a layer module that has imported two of them."""
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.rwkv7", "fla.layers", "fla.layers.gla")}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    modules["fla"].__version__ = ours.VERSIONS[-1]
    for name in NAMES:
        function = lambda *arguments, **options: theirs()  # noqa: E731
        setattr(modules[place(name)], name, function)
    modules["fla.ops"].rwkv7 = modules["fla.ops.rwkv7"]
    modules["fla.layers.gla"].kernel = modules["fla.ops"].chunk_gla
    modules["fla.layers.gla"].fused_chunk_gla = modules["fla.ops"].fused_chunk_gla
    modules["fla.layers.gla"].chunk_size = 64
    return modules


def test_patch_replaces_functions_wherever_they_are_held(standin):
    layer = standin["fla.layers.gla"]
    before = {name: dict(vars(module)) for name, module in standin.items()}
    with ours.patch() as patched:
        assert layer.kernel is ours.chunk_gla
        assert all(getattr(standin[place(name)], name) is FUNCTIONS[name] for name in PATCHED)
        assert set(patched.replaced) == {f"{place(name)}.{name}" for name in PATCHED} | {"fla.layers.gla.kernel"}
        assert layer.fused_chunk_gla is before["fla.ops"]["fused_chunk_gla"]
        assert "fla.layers.gla.kernel" in repr(patched)
    assert {name: dict(vars(module)) for name, module in standin.items()} == before
    assert "restored" in repr(patched)


def test_patches_count(standin):
    layer = standin["fla.layers.gla"]
    original = layer.kernel
    first = ours.patch()
    second = ours.patch()
    assert first.replaced == second.replaced
    first.restore()
    first.restore()
    assert layer.kernel is ours.chunk_gla
    second.restore()
    assert layer.kernel is original


def test_restore_leaves_what_others_have_set_since(standin):
    layer = standin["fla.layers.gla"]
    with ours.patch():
        layer.kernel = theirs
    assert layer.kernel is theirs


@pytest.mark.parametrize("times", [30, *slow(200)])
def test_patches_of_several_threads_leave_the_originals(standin, times):
    layer, failures = standin["fla.layers.gla"], []
    original = layer.kernel

    def work():
        for _ in range(times):
            with ours.patch():
                if layer.kernel is not ours.chunk_gla:
                    failures.append(layer.kernel)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert layer.kernel is original


def test_unknown_versions_are_refused(standin):
    standin["fla"].__version__ = "0.7.1"
    original = standin["fla.layers.gla"].kernel
    with pytest.raises(PenstockError, match=r"patch: fla must be of version 0\.6\.0, got 0\.7\.1\. Call the functions"):
        ours.patch()
    assert standin["fla.layers.gla"].kernel is original


def test_a_missing_fla_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(PenstockError, match=r"patch: fla must be installed, got .*Install flash-linear-attention==0\.6\.0"):
        ours.patch()


@pytest.fixture
def fla():
    return pytest.importorskip("fla", reason="flash-linear-attention is not installed")


@pytest.mark.parametrize("name", PATCHED)
def test_the_parameters_are_those_of_fla(name, fla):
    listed = inspect.signature(ours._theirs(fla.ops, name)).parameters.values()
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    listed = [(one.name, one.default) for one in listed if one.kind is not one.VAR_KEYWORD]
    assert [(one.name, one.default) for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == listed


def test_the_reference_functions_of_fla_agree(fla):
    B, T, H, K, V = 2, 9, 3, 4, 5
    q, k, u, state = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(H, K), torch.randn(B, H, K, V)
    v, g = torch.randn(B, T, H, V), F.logsigmoid(torch.randn(B, T, H, K))
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
    from fla.ops.retention.naive import naive_retention
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    from fla.ops.simple_gla.naive import naive_parallel_simple_gla, naive_recurrent_simple_gla

    options = {"initial_state": state, "output_final_state": True}
    heads_first = [x.transpose(1, 2) for x in (q, k, v, g)]
    pairs = [
        (ours.chunk_gla(q, k, v, g, **options), naive_recurrent_gla(q, k, v, g, **options)),
        (ours.chunk_simple_gla(q, k, v, g[..., 0], **options), naive_recurrent_simple_gla(q, k, v, g[..., 0], **options)),
        (ours.chunk_rwkv6(*heads_first, u, head_first=True, **options), naive_recurrent_rwkv6(*heads_first, u, **options)),
        (ours.fused_recurrent_linear_attn(q, k, v, **options), naive_recurrent_linear_attn(q, k, v, **options)),
        (ours.parallel_retention(q, k, v)[:1], [naive_retention(*heads_first[:3]).transpose(1, 2)]),
        (ours.parallel_simple_gla(q, k, v, g[..., 0], output_attentions=True), naive_parallel_simple_gla(q, k, v, g[..., 0])),
    ]
    for mine, theirs in pairs:
        for one, other in zip(mine, theirs):
            close(one, other)
    options["initial_state"] = state, torch.rand(B, 1, H, K)
    mine = ours.chunk_linear_attn(q.abs(), k.abs(), v, **options)
    theirs = naive_recurrent_linear_attn(q.abs(), k.abs(), v, normalize=True, **options)
    for one, other in zip((mine[0], *mine[1]), (theirs[0], *theirs[1])):
        close(one, other)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 50, "intermediate_size": 48}
MODELS = {
    "GLA": {},
    "HGRN2": {"expand_ratio": 16},
    "LinearAttention": {"feature_map": "elu", "do_feature_map_norm": True},
    "RetNet": {},
    "RWKV6": {},
    "DeltaNet": {},
    "GatedDeltaNet": {"head_dim": 16, "num_v_heads": 4, "expand_v": 1.0, "allow_neg_eigval": True},
    "KDA": {"head_dim": 16, "safe_gate": True, "lower_bound": -5.0},
    "RWKV7": {"head_dim": 16, "num_heads": None},
}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in PATCHED if name not in [row[0] for row in TABLE]])
def test_the_kernels_of_fla_agree(name, fla):
    B, T, H, K, V = 2, 130, 2, 32, 64
    torch.manual_seed(0)
    shapes = {"q": (B, T, H, K), "r": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V), "u": (H, K)}
    shapes |= {"g": (B, T, H) if "simple_gla" in name else (B, T, H, K), "gk": (B, T, H, K), "w": (B, T, H, K)}
    parameters = inspect.signature(getattr(fla.ops, name)).parameters
    call = {key: torch.rand(shape, device=DEVICE) for key, shape in shapes.items() if key in parameters}
    call |= {key: F.logsigmoid(4 * call[key]) for key in ("g", "gk", "w") if key in call}
    variations = [{}, {"scale": 0.3}]
    if "initial_state" in parameters:
        state = torch.randn(B, H, K, V, device=DEVICE)
        variations.append({"initial_state": state, "output_final_state": True} | ({"normalize": False} if "linear_attn" in name else {}))
    if "reverse" in parameters:
        variations.append({**variations[-1], "reverse": True})
    if "state_v_first" in parameters:
        swapped = state.transpose(2, 3).contiguous()
        variations.append({"initial_state": swapped, "output_final_state": True, "state_v_first": True})
    if "normalize" in parameters:
        variations.append({"normalize": True, "initial_state": (state, torch.rand(B, 1, H, K, device=DEVICE)), "output_final_state": True})
    if "g_gamma" in parameters:
        variations.append({"g": None, "g_gamma": -torch.rand(H, device=DEVICE)})
    if "output_attentions" in parameters:
        variations.append({"output_attentions": True})
    for options in variations:
        mine, theirs = FUNCTIONS[name](**{**call, **options}), getattr(fla.ops, name)(**{**call, **options})
        pairs = [(mine[0], theirs[0])]
        if options.get("output_final_state") or options.get("output_attentions"):
            pairs += zip(mine[1], theirs[1]) if isinstance(mine[1], tuple) else [(mine[1], theirs[1])]
        for one, other in pairs:
            assert one.shape == other.shape
            error = (one - other).double().pow(2).mean().sqrt() / other.double().pow(2).mean().sqrt()
            assert error < 5e-3, options  # their products of float32 use TF32


@pytest.fixture
def model_of(fla, monkeypatch):
    """Small models of fla. Without a GPU, its other kernels run under Triton's interpreter, whose autotuner cannot measure."""
    from fla import models
    from triton.runtime import autotuner

    if DEVICE == "cpu":
        monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *arguments, **options: [0.0, 0.0, 0.0])
        monkeypatch.setattr(autotuner.Autotuner, "check_disk_cache", lambda self, key, configs, bench: bench() and False)

    def make(kind):
        torch.manual_seed(0)
        config = getattr(models, f"{kind}Config")(**{**SIZES, **MODELS[kind]}, fuse_norm=False, fuse_swiglu=False, fuse_cross_entropy=False)
        return getattr(models, f"{kind}ForCausalLM")(config).to(DEVICE).eval()

    return make


def written_out(name):
    """A function of fla, in terms of the loop."""

    def function(q=None, k=None, v=None, g=None, gk=None, r=None, w=None, u=None, scale=None, normalize=False, **options):
        q, g = next(x for x in (q, r) if x is not None), next((x for x in (g, gk, w) if x is not None), None)
        assert options.pop("initial_state") is None
        if "retention" in name:
            g = torch.log(1 - 2.0 ** (-5 - torch.arange(q.shape[2]))).to(q).expand(q.shape[:3])
        if normalize:
            scale = 1.0
        output = loop(q, k, v, g=g, u=u, scale=scale)[0]
        return (output / (q * k.cumsum(1)).sum(-1, keepdim=True) if normalize else output).to(v), None

    return function


def delta_written_out(**x):
    """A function of fla of the delta rule, in terms of the loop."""
    assert x["initial_state"] is None
    k, v, g, beta = (x.get(name) for name in ("k", "v", "g", "beta"))
    q = x["r"] if "r" in x else x["q"]
    if "w" in x:
        a, b = (-x["kk"], x["kk"] * x["a"]) if "kk" in x else (x["a"], x["b"])
        return delta_loop(q, k, v, a=a, b=b, g=x["w"], scale=x["scale"], before=True)[0].to(v), None
    if x["use_qk_l2norm_in_kernel"]:
        q, k = (one.double() / (one.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (1 + x["allow_neg_eigval"])
    if x.get("use_gate_in_kernel"):
        rate = x["A_log"].exp().view(-1, *[1] * (g.dim() - 3))
        gate = g + x["dt_bias"].view(g.shape[2:])
        bound = x.get("lower_bound")
        g = -rate * F.softplus(gate) if bound is None else bound * torch.sigmoid(rate * gate)
    return delta_loop(q, k, v, beta=beta, g=g)[0].to(v), None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_fla_run_on_our_operators(kind, model_of, monkeypatch):
    model = model_of(kind)
    ids = torch.randint(0, 50, (2, 70), device=DEVICE)  # more than 64 tokens: mode chunk
    with ours.patch(), torch.no_grad():
        logits = model(ids).logits
        prompt = model(ids[:, :66], use_cache=True)
        parts, cache = [prompt.logits], prompt.past_key_values
        for t in range(66, 70):
            step = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            parts, cache = [*parts, step.logits], step.past_key_values
    close(torch.cat(parts, 1), logits)
    layer = sys.modules[type(model.model.layers[0].attn).__module__]
    for name in PATCHED:
        if hasattr(layer, name):
            of_delta = name in [row[0] for row in TABLE]
            monkeypatch.setattr(layer, name, delta_written_out if of_delta else written_out(name))
    with torch.no_grad():
        close(model(ids).logits, logits)


@pytest.mark.filterwarnings("ignore")
def test_models_of_fla_train_and_generate_on_our_operators(model_of):
    model = model_of("GLA")
    ids = torch.randint(1, 50, (2, 7), device=DEVICE)
    with ours.patch():
        generated = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
        for t in range(7, generated.shape[1]):
            with torch.no_grad():
                expected = model(generated[:, :t]).logits[:, -1].argmax(-1)
            assert torch.equal(generated[:, t], expected)
        model(ids, labels=ids).loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
