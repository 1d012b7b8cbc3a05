"""Time and host memory of a prediction: ``python benchmarks/cost.py``; each run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = [  # task, micro-batches, tokens, card, seconds and GiB that the project allows
    ("qwen2.5-1.5b", 1, 512, "rtx4090", 10, 1.5),
    ("qwen2.5-1.5b", 16, 512, "rtx4090", 10, 1.5),
    ("qwen2.5-1.5b", 100_000, 512, "rtx4090", 10, 1.5),
    ("hf:70b", 4, 2048, "b200", 60, 1.5),
]
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


def main() -> None:
    print("| task | micro-batches | tokens | wall time | allowed | host memory | allowed | peak reserved, predicted |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "70b").mkdir()
        (Path(folder) / "70b" / "config.json").write_text(json.dumps(LLAMA_70B))
        for task, micro_batches, tokens, card, seconds, gib in RUNS:
            arguments = ["anatomy", "--task", task.replace("hf:", f"hf:{folder}/"), "--dtype", "bf16", "--device", card]
            arguments += ["--accumulate", str(micro_batches), "--seq-len", str(tokens), "--out", folder]
            begin = time.perf_counter()
            command = [sys.executable, "-m", "fullbatch", *arguments]
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(child.pid, 0)
            wall = time.perf_counter() - begin
            if os.waitstatus_to_exitcode(status) not in (0, 1):
                sys.exit(f"failed: {' '.join(command)}")
            peak = json.loads((Path(folder) / "anatomy.json").read_text())["peak_reserved_bytes"]
            print(
                f"| {task} | {micro_batches:,} | {tokens:,} | {wall:.1f} s | {seconds} s "
                f"| {used.ru_maxrss / 2**20:.2f} GiB | {gib} GiB | {peak / 2**30:.2f} GiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
