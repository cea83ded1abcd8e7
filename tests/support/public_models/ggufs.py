"""GGUF files with the tensors of RWKV-6 and RWKV-7 as llama.cpp's converter lays them out, written by the package gguf."""

from pathlib import Path

import torch
from torch import Tensor

from . import Weights, depth

OUTER = {"emb.weight": "token_embd.weight", "ln_out": "output_norm", "head.weight": "output.weight", "blocks.0.ln0": "token_embd_norm"}
COMMON = {"ln1": "attn_norm", "ln2": "attn_norm_2", "att.ln_x": "time_mix_ln", "att.time_faaaa": "time_mix_first.weight"}


def tensors(w: Weights, rescale_every: int = 0, fused: bool = True) -> Weights:
    """The tensors of a file, from those of BlinkDL's. ``fused``: token shifts of RWKV-6 are one tensor."""
    found, seven = {}, "blocks.0.att.r_k" in w
    for name, x in w.items():
        outer = next((one for one in OUTER if name.startswith(one)), None)
        if outer is not None:
            found[name.replace(outer, OUTER[outer])] = x
            continue
        _, n, rest = name.split(".", 2)
        common = next((one for one in COMMON if rest.startswith(one)), None)
        if common is not None:
            found[f"blk.{n}.{rest.replace(common, COMMON[common])}"] = x
            continue
        mix, one = rest.split(".", 1)
        one = one.removesuffix(".weight").replace("time_maa_w", "w").replace("time_maa_", "lerp_").replace("time_", "")
        one = {"w": "lerp_w"}.get(one, one) if not seven else one.replace("x_", "lerp_")
        if one in ("w1", "decay_w1", "decay_w2") or (seven and one in ("w2", "a1", "a2", "v1", "v2", "g1", "g2")):
            x = x.T
        elif one == "w2":
            x = x.permute(0, 2, 1)
        elif x.dim() == 3 or one == "r_k":
            x = x.flatten()
        if rescale_every and one in ("output", "value") and (one == "output") == (mix == "att"):
            x = x / 2 ** (int(n) // rescale_every)
        place = f"blk.{n}.{'time' if mix == 'att' else 'channel'}_mix_{one}.weight"
        if not (seven and n == "0" and one in ("v0", "v1", "v2")):
            found[place] = x
        if seven and n == "0" and mix == "att" and one in ("a0", "a1", "a2"):  # llama.cpp needs some in layer 0
            found[place.replace("mix_a", "mix_v")] = x
    order = "rwkvag" if seven else "wkvrg"
    for n in range(depth(w, "blocks.") if fused else 0):
        parts = [found.pop(f"blk.{n}.time_mix_lerp_{one}.weight") for one in order]
        found[f"blk.{n}.time_mix_lerp_fused.weight"] = torch.stack(parts).view(len(order), 1, 1, -1)
    return found


def write(w: Weights, folder: Path, kind: str = "F32", rescale_every: int = 0, fused: bool = True, **metadata: object) -> Path:
    """Matrices have the type ``kind``, all else F32."""
    import gguf
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    path, seven = folder / f"small-{kind}.gguf", "blocks.0.att.r_k" in w
    arch = str(metadata.get("architecture", "rwkv7" if seven else "rwkv6"))
    writer = gguf.GGUFWriter(path, arch)
    writer.add_layer_norm_eps(1e-5)
    writer.add_block_count(metadata.get("block_count", depth(w, "blocks.")))
    writer.add_embedding_length(metadata.get("embedding_length", w["emb.weight"].shape[1]))
    writer.add_wkv_head_size(w["blocks.0.att.r_k" if seven else "blocks.0.att.time_faaaa"].shape[1])
    if rescale_every:
        writer.add_rescale_every_n_layers(rescale_every)
    writer.add_token_list([b"a", b"b"])
    chosen = gguf.GGMLQuantizationType[kind]
    for name, x in tensors(w, rescale_every, fused).items():
        data = x.contiguous().numpy().astype(numpy.float32)
        if kind != "F32" and quantised(name, x, kind):
            writer.add_tensor(name, gguf.quantize(data, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(name: str, x: Tensor, kind: str) -> bool:
    """Whether a tensor has the type of matrices."""
    small = ("_norm", "lerp", "time_mix_ln", "w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2", "first")
    return x.dim() == 2 and not any(one in name for one in small) and (kind[0] != "Q" or x.shape[1] % 32 == 0)
