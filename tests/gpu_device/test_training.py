"""Training, generation and scores on a GPU. Run with ``pytest -m gpu``."""

import pytest
import torch

from penstock.models import CausalLM, gla, load, rwkv6
from penstock.models.loss import linear_cross_entropy
from penstock.models.streaming import stream
from penstock.training.mqar import Recall
from penstock.training.scoring import score
from penstock.training.settings import parse
from penstock.training.synthetic import learn, model_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = CausalLM(rwkv6(vocab_size=256, hidden_size=128, num_layers=2, head_size=64))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("V", [65536, 50257])
def test_losses_of_large_vocabularies(V, dtype):
    """Twice, with equal bits; against float64."""
    random = torch.Generator("cuda").manual_seed(0)
    x, weight = ((torch.randn(rows, 64, generator=random, device="cuda") / 2).to(dtype).requires_grad_() for rows in (3000, V))
    labels = torch.randint(V, (3000,), generator=random, device="cuda")
    labels[::5] = -100
    found = [(loss := linear_cross_entropy(x, weight, labels)).detach(), *torch.autograd.grad(loss, (x, weight))]
    again = [(loss := linear_cross_entropy(x, weight, labels)).detach(), *torch.autograd.grad(loss, (x, weight))]
    assert all(torch.equal(one, other) for one, other in zip(found, again))
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    true = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, labels)
    for one, other in zip(found, (true, *torch.autograd.grad(true, wide))):
        assert (one.double() - other).norm() <= max(8 * torch.finfo(dtype).eps, 1e-5) * other.norm()


@pytest.mark.skipif(torch.__version__ < "2.11" or torch.version.hip is not None, reason="matrix products round to 16 bits")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_peak_memory_of_the_loss(dtype):
    """In the forward pass the logits of one chunk and two float32 gradients; in the backward pass these and the gradients of 16 bits."""
    T, C, V, slack = 8192, 512, 32000, 2**23
    x, weight = (torch.randn(rows, C, device="cuda").to(dtype).requires_grad_() for rows in (T, V))
    labels = torch.randint(V, (T,), device="cuda")
    linear_cross_entropy(x[:8], weight, labels[:8]).backward()  # memory of cuBLAS
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before, sums = torch.cuda.memory_allocated(), 4 * (T + V) * C
    loss = linear_cross_entropy(x, weight, labels)
    assert torch.cuda.max_memory_allocated() - before <= 2 * 2048 * V + sums + slack
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before <= sums + 2 * (T + V) * C + slack


@pytest.mark.parametrize("make", [gla, rwkv6], ids=lambda make: make.__name__)
def test_selective_recomputation(make):
    """The loss has the same bits, gradients the same accuracy; the peak of memory is lower by norms, shifts and log decays at least."""
    config, found = make(vocab_size=256, hidden_size=512, num_layers=4), []
    torch.manual_seed(0)
    model, ids = CausalLM(config).cuda().bfloat16(), torch.randint(256, (4, 1025), device="cuda")
    for checkpointing in (False, False, "selective"):  # the first pass compiles kernels
        model.gradient_checkpointing = checkpointing
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append((torch.cuda.max_memory_allocated() - before, loss.detach(), [x.grad.double() for x in model.parameters()]))
    (_, *_), (most, loss, wanted), (least, again, gradients) = found
    assert torch.equal(loss, again)
    assert all((x - y).norm() <= 0.02 * y.norm() for x, y in zip(gradients, wanted))
    kept = {"gla": 2 * 2 + 4 / 2 + 2 / 2, "rwkv6": 2 * 2 + 2 * 8 + 4 + 2}[make.__name__]  # bytes of a token and channel
    assert most - least >= 0.8 * config.num_layers * kept * ids[:, 1:].numel() * config.hidden_size


def test_scores_and_generation_agree_with_the_cpu(model):
    sequences = [torch.randint(256, (length,)).tolist() for length in (1, 5, 70, 300)]
    on_cpu, prompt = score(model, sequences), sequences[2]
    greedy = list(stream(model, prompt, 20, temperature=0))
    on_gpu = CausalLM(model.config)
    on_gpu.load_state_dict(model.state_dict())
    on_gpu.cuda()
    for one, other in zip(score(on_gpu, sequences, 64), on_cpu):
        assert torch.allclose(one.log_p, other.log_p, rtol=1e-3, atol=1e-3)
    assert list(stream(on_gpu, prompt, 20, temperature=0)) == greedy
    sampled = [list(stream(on_gpu, prompt, 20, generator=torch.Generator("cuda").manual_seed(seed))) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("packing", [False, True])
def test_training_in_bfloat16_lowers_the_loss(tmp_path, packing):
    pytest.importorskip("transformers")
    from penstock.training.run import train

    (tmp_path / "a.txt").write_text("the cat sat on the mat. \n\n" * 300)
    content = {
        "model": {"architecture": "rwkv6", "hidden_size": 64, "num_layers": 2},
        "data": {"train": str(tmp_path / "a.txt"), "length": 128, "packing": packing, "separator": "\n\n"},
        "training": {"output": str(tmp_path / "run"), "steps": 60, "batch_size": 4, "learning_rate": 5e-3, "tensorboard": False},
    }
    trained = train(parse(content))
    assert trained.loss < 1.5
    assert load(trained.folder).embeddings.weight.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gla", "rwkv6"])
def test_eight_pairs_are_recalled(architecture):
    recall = Recall(pairs=8)
    torch.manual_seed(0)
    model = CausalLM(model_config(architecture, recall, hidden_size=128, num_layers=2)).cuda()
    assert learn(model, recall, seconds=600, enough=0.95)[-1].accuracy >= 0.95
