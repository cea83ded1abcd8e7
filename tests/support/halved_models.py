"""Deep float16 models, and the same ones with a residual stream that float16 has no numbers for."""

from __future__ import annotations

import math

import torch
from architectures import ARCHITECTURES, flat, model_of
from torch import Tensor, nn

from penstock.models import CausalLM

LAST = ("output", "o_proj", "out_proj", "down_proj", "channel.value")
"""The last linear maps of mixers, by the ends of their names."""
IDS = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(5))


def deep(name: str, every: int, dtype: torch.dtype = torch.float16, layers: int = 6) -> CausalLM:
    """A model of many layers, whose residual stream grows from each to the next. Its eps is not small beside it."""
    config, mixers = ARCHITECTURES[name], {}
    for part in ("mixer", "channel"):
        one = getattr(config, part)
        mixers[part] = (one * layers)[:layers] if isinstance(one, tuple) else one
    changes = {"num_layers": layers, "rescale_every": every, "norm_eps": 0.3, "tie_embeddings": False, "residual_in_float32": False}
    model = model_of(name, dtype, **changes, **mixers)
    for place, one in last_maps(model).items():
        for x in one.parameters():
            x.data.mul_(2.0 ** int(place.split(".")[1]))
    for name, x in model.named_parameters():  # few bits: smaller by a power of two, they are no less exact
        if ".attention." in name:
            x.data = (x.data * 2**10).round() / 2**10
    return model


def last_maps(model: CausalLM) -> dict[str, nn.Module]:
    return {name: one for name, one in model.named_modules() if name.endswith(LAST)}


@torch.no_grad()
def enlarged(model: CausalLM, power: int) -> CausalLM:
    """A model whose residual stream is 2**power times as large, and whose logits are the same."""
    for one in (model.embedding_norm or model.embeddings, *last_maps(model).values()):
        for x in one.parameters():
            x.mul_(2.0**power)
    part = power // 2
    rest = power - part  # DeepEmbed: its matrices are 2**part times as large, which s1 undoes
    changes = {"channel.s_emb_x": -rest, "channel.s_emb": part, "channel.s1": -part}
    inside = {"qq": -power, "k1": -part, "k2": -rest, "v1": -part, "v2": -rest, "k_emb_x": -power, "v_emb_x": -power, "lnv": power}
    changes |= {f"attention.{name}": change for name, change in inside.items()}  # it reads the stream and the embeddings
    for name, x in model.named_parameters():
        place = name.removesuffix(".weight").removesuffix(".bias").split(".")[-2:]
        x.mul_(2.0 ** changes.get(".".join(place), 0))
    for one in (model.norm, *(norm for layer in model.layers for norm in (layer.mixer_norm, layer.channel_norm))):
        if one is not None:
            one.eps *= 4.0**power
    return model


@torch.no_grad()
def power_of(name: str) -> int:
    """The smallest power that makes the largest number of the residual stream too large."""
    model, seen = deep(name, 0, torch.float64), []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, given, result: seen.append(result[0].abs().max().item()))
    model(IDS)
    return math.ceil(math.log2(70_000 / max(seen)))


def outputs(model: CausalLM) -> list[Tensor]:
    """Logits in each way, and states."""
    ids = IDS.to(model.head.weight.device)
    whole = model(ids)
    pool, once = model.initial_state(2, max_length=9), model.initial_state(2, max_length=9)
    steps = torch.cat([model.advance(ids[:, t : t + 1], pool) for t in range(9)], 1)
    packed = model(ids.view(1, -1), cu_seqlens=torch.tensor([0, 4, 18], device=ids.device)).logits
    return [whole.logits, *flat(whole.state), model.advance(ids, once), steps, *flat(pool), packed]


def of_its_scale(name: str, results: list[Tensor], power: int) -> list[Tensor]:
    """``outputs`` of an enlarged model for comparison: values in a cache, which are added to the stream, divided by 2**power."""
    return [x * 0.5**power if name == "rwkv7b" and x.shape[-2:] == (1, 24) else x for x in results]
