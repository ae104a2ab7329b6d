"""Counts a folder of .jsonl(.gz) files by a datatrove pipeline and joins the shards to an index.

    python examples/count_corpus.py TEXTS --tokenizer MODEL --out corpus.ngram --workers 2

On a cluster replace `LocalPipelineExecutor` by datatrove's `SlurmPipelineExecutor` or `RayPipelineExecutor`, and its
reader by the one for your data; the steps are the same. A second run counts only the tasks that are not done.
"""

from __future__ import annotations

import argparse
import json

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader

from dartspec.interop.datatrove import CountGrams, tokens_of
from dartspec.ngram.build import join
from dartspec.text import Text, load_tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--shards", help="folder of the shards; default: OUT.shards")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-count", type=int, default=1)
    args = parser.parse_args(arguments)
    shards = args.shards or f"{args.out}.shards"
    pipeline = [JsonlReader(args.texts), CountGrams(shards, args.tokenizer)]
    LocalPipelineExecutor(pipeline, tasks=args.tasks, workers=args.workers, logging_dir=f"{shards}/logs").run()
    tokens = tokens_of(Text(load_tokenizer(args.tokenizer)), args.tokenizer)
    built = join([(shards, 1)], args.out, tokens=tokens, min_count=args.min_count, description=args.texts)
    print(json.dumps(built.index.info()))


if __name__ == "__main__":
    main()
