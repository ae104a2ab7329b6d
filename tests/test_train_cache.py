"""States of the target on disk: shards that are whole or not there, with the token ids they were computed for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.train.data import Example
from dartspec.train.features import StateCache, States, cache_info, grouped
from dartspec.train.run import TargetStates

TAPS = (1, 2, 3)


def examples() -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(8, 30, (9,), generator=generator).tolist()
    return [Example.answered(torch.randint(3, 97, (n,), generator=generator).tolist(), 5) for n in lengths]


def source() -> TargetStates:
    return TargetStates(Target(tiny.model("llama"), tiny.VOCAB, frozenset({2}), "tiny"), TAPS)


def small(folder: Path, of: list[Example] | None = None, taps: tuple[int, ...] = TAPS) -> StateCache:
    """A cache of about three examples a shard."""
    of = of or examples()
    info = cache_info(of, "weights1", taps, 32)
    return StateCache(folder, info, of, shard_bytes=60 * info.bytes_a_token)


def quiet(_: str) -> None:
    return None


def test_what_was_written_is_read_and_is_what_the_target_gave(tmp_path: Path) -> None:
    cache, target, said = small(tmp_path / "c"), source(), []
    cache.fill(target, said.append, report_every_s=0)
    assert len(list((tmp_path / "c").glob("states-*.safetensors"))) > 2
    assert said[-1].startswith(f"states: {cache.info.num_tokens:,} of {cache.info.num_tokens:,} tokens")
    for opened in (cache, small(tmp_path / "c")):
        for i in (8, 0, 4, 3, 3):
            wanted, got = target.states(examples()[i]), opened.read(i)
            assert torch.equal(got.features, wanted.features.to(torch.bfloat16))
            assert torch.equal(got.final, wanted.final.to(torch.bfloat16))
            assert torch.equal(got.log_norm, wanted.log_norm)
    on_disk = sum(p.stat().st_size for p in (tmp_path / "c").glob("states-*"))
    assert 0 <= on_disk - cache.info.num_bytes < 1000 * len(list((tmp_path / "c").iterdir()))  # headers


def test_it_goes_on_at_the_first_shard_that_is_missing(tmp_path: Path) -> None:
    target, asked = source(), list[Example]()

    class Dying:
        def many(self, some: Any) -> list[States]:
            if len(asked) >= 5:
                raise KeyboardInterrupt
            asked.extend(some)
            return target.many(some)

    cache = small(tmp_path / "c")
    with pytest.raises(KeyboardInterrupt):
        cache.fill(Dying(), quiet)
    there = sorted(p.name for p in (tmp_path / "c").glob("states-*"))
    assert there
    assert not any(name.endswith("tmp") for name in there)
    (tmp_path / "c" / "states-00002.safetensors.tmp").write_bytes(b"half")  # a kill in the middle of a write
    again, whole = small(tmp_path / "c"), small(tmp_path / "whole")
    asked.clear()
    asked_for: list[Example] = []

    class Counting:
        def many(self, some: Any) -> list[States]:
            asked_for.extend(some)
            return target.many(some)

    again.fill(Counting(), quiet)
    whole.fill(target, quiet)
    assert 0 < len(asked_for) < 9
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes()


def test_several_processes_fill_it_together(tmp_path: Path) -> None:
    alone, shared = small(tmp_path / "alone"), small(tmp_path / "shared")
    alone.fill(source(), quiet)
    for i in (1, 0):
        small(tmp_path / "shared").fill(source(), quiet, part=(i, 2))
    assert all(torch.equal(x, y) for i in range(9) for x, y in zip(alone.read(i), shared.read(i), strict=True))


def test_other_inputs_and_damaged_shards_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    small(folder).fill(source(), quiet)
    with pytest.raises(DartspecError, match=r"taps is \[1, 2, 3\], this run needs \[1, 2\]"):
        small(folder, taps=(1, 2))
    with pytest.raises(DartspecError, match="data_digest"):
        small(folder, examples()[::-1])
    shard = folder / "states-00000.safetensors"
    content = load_file(shard)
    content["ids"][2] += 1
    save_file(content, shard)
    with pytest.raises(DartspecError, match="holds other tokens than answer 0 of the data: delete it"):
        small(folder).read(0)
    save_file({**content, "states": content["states"][:, :2].clone()}, shard)
    with pytest.raises(DartspecError, match=r"holds \{.*expected \{.*delete it"):
        small(folder).read(0)
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(DartspecError, match="is not a whole shard of states"):
        small(folder).read(0)
    shard.unlink()
    cache = small(folder)
    cache.fill(source(), quiet)
    assert torch.equal(cache.read(0).final, source().states(examples()[0]).final.bfloat16())


def test_its_size_is_looked_at_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(DartspecError, match=r"needs 0\.0 GB, 0\.0 GB are free"):
        small(tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_grouping() -> None:
    assert grouped([3, 4, 5, 20, 1], 8) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert grouped([], 8) == []
