"""Our plain decoding and DART beside llama.cpp on the same weights: bf16, and the Q4_1 file that the weights come from.

    python -m venv llama && llama/bin/pip install llama-cpp-python gguf     # compiles llama.cpp for this machine
    python benchmarks/llamacpp.py --llama-python llama/bin/python --gguf MODEL.Q4_1.gguf --out llamacpp.json

llama.cpp runs in a process of its own (its own environment; no torch beside it) and takes its turn prompt by prompt:
ours, llama.cpp, ours ... Greedy, exactly --max-tokens tokens each, end-of-text ignored, the prefill left out; the ratio
is taken prompt by prompt, the median and its range are printed. One thread each unless --threads says more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SERVER = """
import json, sys, time
import numpy as np
import llama_cpp
models = {}
for line in sys.stdin:
    a = json.loads(line)
    key = a["path"]
    if key not in models:
        models.clear()
        n = a["threads"]
        models[key] = llama_cpp.Llama(key, n_ctx=2048, n_threads=n, n_threads_batch=n, verbose=False)
    m = models[key]
    m.reset()
    m.eval(a["ids"])
    out = []
    began = time.perf_counter()
    for _ in range(a["n"]):
        token = int(np.argmax(m.scores[m.n_tokens - 1])) if m._logits_all else m.sample(temp=0.0)
        out.append(token)
        m.eval([token])
    took = time.perf_counter() - began
    print(json.dumps({"ms": 1e3 * took / a["n"], "ids": out, "version": llama_cpp.__version__,
                      "system": llama_cpp.llama_print_system_info().decode()}), flush=True)
"""

WRITER = """
import sys
import numpy as np
import gguf
source, target = sys.argv[1:]
r = gguf.GGUFReader(source)
arch = r.fields["general.architecture"].contents()
w = gguf.GGUFWriter(target, arch)
for name, field in r.fields.items():
    if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
        continue
    kind = field.types[0]
    w.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
for t in r.tensors:
    x = gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
    if x.ndim == 1:
        w.add_tensor(t.name, x)
    else:
        bf16 = gguf.quantize(x, gguf.GGMLQuantizationType.BF16)
        w.add_tensor(t.name, bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama-python", required=True, help="a Python with llama-cpp-python and gguf")
    p.add_argument("--gguf", type=Path, required=True, help="the quantised file; a bf16 one is made of it")
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()

    import dartspec
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.suites import load_suites

    sets = load_suites(["all"], a.prompts)
    prompts = [s[k].turns[0] for k in range(a.prompts) for s in sets.values() if k < len(s)][: a.prompts]
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "bf16.gguf"
        subprocess.run([a.llama_python, "-c", WRITER, str(a.gguf), str(wide)], check=True)
        dart = dartspec.load(threads=a.threads, dtype="bfloat16")
        plain = dart.with_drafter("none")
        server = subprocess.Popen(
            [a.llama_python, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None

        def ours(lm: dartspec.LM, ids: list[int]) -> dict[str, Any]:
            r = lm.generate(ids, max_tokens=a.max_tokens + 1, ignore_eos=True)
            return {"ms": r.metrics.ms_per_token, "ids": r.ids}

        def theirs(path: Path, ids: list[int]) -> dict[str, Any]:
            ask = {"path": str(path), "threads": a.threads, "ids": ids, "n": a.max_tokens}
            server.stdin.write(json.dumps(ask) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        ms: dict[str, list[float]] = {}
        same, version = 0, {}
        for name, path in (("bf16", wide), ("q4_1", a.gguf)):
            for i, text in enumerate([prompts[0], *prompts]):
                ids = plain.encode([{"role": "user", "content": text}])
                one, other, three = ours(plain, ids), theirs(path, ids), ours(dart, ids)
                if not i:
                    continue  # warms up
                version = {k: other[k] for k in ("version", "system")}
                for what, r in ((f"plain|{name}", one), (f"dart|{name}", three), (f"llama.cpp|{name}", other)):
                    ms.setdefault(what, []).append(r["ms"])
                same += name == "bf16" and one["ids"][:32] == other["ids"][:32]
        server.stdin.close()
    rows = {}
    for name in ("bf16", "q4_1"):
        llama = ms[f"llama.cpp|{name}"]
        for what in ("plain", "dart"):
            ratios = [b / x for b, x in zip(llama, ms[f"{what}|{name}"], strict=True)]
            rows[f"{what} against llama.cpp {name}"] = {
                "median": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "ms": [round(statistics.median(ms[f"{what}|{name}"]), 2), round(statistics.median(llama), 2)],
            }
    result = {
        "rows": rows,
        "first_32_tokens_equal": [same, a.prompts],
        "llama_cpp": version,
        "provenance": provenance(threads=a.threads, prompts=a.prompts, max_tokens=a.max_tokens),
    }
    for name, row in rows.items():
        print(
            f"{name:32s} {row['median']:.2f}x  ({row['range'][0]:.2f} to {row['range'][1]:.2f})  ms {row['ms']}",
            file=sys.stderr,
        )
    if a.out:
        save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
