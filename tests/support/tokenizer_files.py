"""Small tokenizers as Hugging Face repositories have them."""

import json

from penstock.models.tokenizer_json import HuggingFace
from penstock.models.tokenizers import Bytes, World

SAMPLES = (
    "The quick brown fox. ",
    "Größe über alles Maß ",
    "Съешь же ещё этих мягких булок ",
    "世界人权宣言 第一条 ",
    "こんにちは、カタカナ ",
    "한국어 문장입니다 ",
    "مرحبا بالعالم ",
    "हिन्दी में पाठ ",
    "ภาษาไทย ",
    "👩‍👩‍👧‍👦🇩🇪🤷🏽‍♂️ ",
    "def f(x):\n\treturn x ** 2\r\n",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ",
)
"""Texts of several scripts, to train tokenizers with."""


def streamed(tokenizer, tokens, after=()):
    """What the incremental decoder gives for each token, and at the end."""
    stream = tokenizer.stream(after)
    return [*(stream.push(token) for token in tokens), stream.finish()]


def written(folder, texts):
    """tokenizer.json of three kinds: BPE of bytes as in GPT-2, and BPE with one token for each unknown byte as in Llama and as in Mistral.

    The last one adds a space to the begin of a text that has none, and a special token before it.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    of_bytes = Tokenizer(models.BPE())
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False)
    of_bytes.train_from_iterator(texts, trainer)

    fallback = {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"<end>": 0}
    characters = {character: 257 + i for i, character in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    merges = [("▁", "a"), ("t", "h"), ("th", "e")]
    merged = {"".join(pair): 257 + len(characters) + i for i, pair in enumerate(merges)}
    with_fallback = Tokenizer(models.BPE(vocab=fallback | characters | merged, merges=merges, byte_fallback=True))
    with_fallback.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    with_fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    with_fallback.add_special_tokens(["<end>"])

    metaspace = Tokenizer(models.BPE(vocab=fallback | characters | merged, merges=merges, byte_fallback=True))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    metaspace.decoder = with_fallback.decoder
    metaspace.add_special_tokens(["<end>", "<begin>"])
    begin = "<begin>", metaspace.token_to_id("<begin>")
    metaspace.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[begin])
    files = {}
    for name, tokenizer in (("bytes", of_bytes), ("fallback", with_fallback), ("metaspace", metaspace)):
        (folder / name).mkdir()
        files[name] = folder / name / "tokenizer.json"
        tokenizer.save(str(files[name]))
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return files


MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def add_markers(file, special):
    """Tokens that a model was trained to write: as in Qwen's files, or as special ones."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_file(str(file))
    made.add_tokens([AddedToken(text, normalized=False, special=special) for text in MARKERS])
    made.save(str(file))


TOKENIZERS = {
    "Bytes": lambda files: Bytes(257),
    "World": lambda files: World(),
    "byte-level": lambda files: HuggingFace(files["bytes"]),
    "byte fallback": lambda files: HuggingFace(files["fallback"]),
    "metaspace": lambda files: HuggingFace(files["metaspace"]),
}
"""All kinds, by what ``written`` gives."""


def tokenizer_of(name, folder, texts=("the cat",)):
    """One of them."""
    return TOKENIZERS[name](written(folder, texts))
