"""A wheel built from the tree works in an empty environment, away from the repository, and bakes the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import arctool, ok, tree
from locations import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git would commit, so that a stray build folder or an ignored file cannot help."""
    copy = tmp_path_factory.mktemp("tree") / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", copy.parent, copy)
    (found,) = copy.parent.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel and what it declares, at the pinned versions."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", wheel)
    return folder


def run(*command: str | Path) -> None:
    done = subprocess.run(list(map(os.fspath, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_package_and_its_tables_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"arctool", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert sum(name.startswith("arctool/quant/tables/") for name in names) >= 5
    assert all(not name.endswith((".pyc", ".orig")) for name in names)


def test_the_wheel_holds_the_texts_that_it_calibrates_and_measures_with(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in ("bake/calibration/texts/calibration.txt", "run/texts/evaluation.txt", "run/texts/validation.txt"):
            assert archive.read(f"arctool/{name}") == (ROOT / "arctool" / name).read_bytes()
            assert f"`{Path(name).name}`" in archive.read(f"arctool/{Path(name).parent}/README.md").decode()


def test_an_empty_environment_with_the_wheel_is_healthy_and_bakes_the_bytes_of_the_tree(
    environment: Path, tiny_llama: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    command = (str(environment / "bin" / "arctool"),)
    found = json.loads(ok(arctool("doctor", "--json", command=command, cwd=tmp_path)).stdout)
    assert found["healthy"]
    ok(arctool("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-o", "a", command=command, cwd=tmp_path))
    assert tree(tmp_path / "a") == tree(tiny_artifact)
    assert "verified" in ok(arctool("verify", "a", command=command, cwd=tmp_path)).stdout
    here = subprocess.run(
        [environment / "bin" / "python", "-c", "import arctool; print(arctool.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert here.stdout.startswith(str(environment))
