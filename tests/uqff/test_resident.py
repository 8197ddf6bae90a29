"""An artifact that was read into memory does not care what becomes of its files."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest

from arctool.errors import FormatError
from arctool.uqff.container import open_artifact
from arctool.uqff.shard import read_whole


def test_a_resident_artifact_outlives_its_files(fixtures_dir: Path, tmp_path: Path) -> None:
    source = next(path for path in sorted((fixtures_dir / "golden").iterdir()) if path.is_dir())
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    with open_artifact(source) as wanted, open_artifact(copy, resident=True) as found:
        for path in copy.iterdir():
            if path.suffix in (".uqff", ".safetensors"):
                path.write_bytes(b"")
        keys = wanted.keys()
        assert found.keys() == keys != ()
        for key in keys:
            for name, entry in wanted.entries(key).items():
                found.shards[0].release(name)
                assert np.array_equal(found.entries(key)[name].raw, entry.raw)
                assert not found.entries(key)[name].raw.flags.writeable


def test_a_file_that_shrinks_while_it_is_read_is_refused() -> None:
    with pytest.raises(FormatError, match=r"a\.uqff: was cut short while it was read"):
        read_whole(io.BytesIO(bytes(100)), 101, Path("a.uqff"))
    assert read_whole(io.BytesIO(b"abc"), 3, Path("a.uqff"))[:] == b"abc"
