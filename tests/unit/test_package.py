"""The installed package: metadata, entry points, types, and binaries for many versions."""

import importlib
import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path

import pytest
import stillframe
from fix_processes import run_python
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(stillframe.__file__).parent


def test_the_version_is_that_of_the_metadata():
    assert importlib.metadata.version("stillframe") == stillframe.__version__


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_core.pyi").exists()


def test_every_file_next_to_the_modules_is_package_data():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    data = tomllib.loads(pyproject)["tool"]["setuptools"]["package-data"]
    patterns = [pattern for of in ("stillframe", "*") for pattern in data[of]]
    beside = [each for each in PACKAGE.rglob("*") if each.is_file() and each.suffix != ".py"]
    for path in beside:
        if path.suffix not in (".pyc", ".so"):
            assert any(path.match(pattern) for pattern in patterns), path


def test_torch_is_needed_to_run_and_no_build_requirement():
    requirements = importlib.metadata.requires("stillframe")
    assert "torch>=2.10" in requirements
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    build_system = pyproject.partition("[project]")[0]
    assert not [
        line
        for line in build_system.splitlines()
        if line.startswith("requires") and "torch" in line
    ]


def test_versions_of_lightning_that_were_malware_are_excluded():
    wanted = [each for each in importlib.metadata.requires("stillframe") if "lightning" in each]
    ours = [Requirement(each) for each in wanted if not each.startswith("pytorch-lightning")]
    assert {str(each.marker) for each in ours} == {'extra == "lightning"', 'extra == "test"'}
    versions = ["2.6.1", "2.6.2", "2.6.3", "2.6.4"]
    for each in ours:
        assert list(each.specifier.filter(versions)) == ["2.6.1", "2.6.4"]


@pytest.mark.parametrize("of", ["docs", "benchmarks"])
def test_pinned_versions_agree_with_their_constraint(of):
    root = Path(__file__).parents[2]
    constraint = _pinned(root / "requirements.txt")
    other = _pinned(root / of / "requirements.txt")
    common = constraint.keys() & other.keys()
    assert {name: other[name] for name in common} == {name: constraint[name] for name in common}


def _pinned(path):
    wanted = [line.strip() for line in path.read_text().splitlines()]
    requirements = [Requirement(line) for line in wanted if line and line[0].isalnum()]
    return {canonicalize_name(each.name): str(each.specifier) for each in requirements}


def test_one_binary_serves_every_python_from_3_11_on():
    assert importlib.util.find_spec("stillframe._core").origin.endswith(".abi3.so")


@pytest.mark.parametrize(
    "group", ["lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory"]
)
def test_lightning_finds_a_callback_factory(group):
    (entry,) = importlib.metadata.entry_points(group=group, name="stillframe")
    assert isinstance(entry.load()(), list)


def test_shell_command_runs_the_main_function_of_the_package():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="stillframe")
    assert entry.load() is importlib.import_module("stillframe.__main__").main


def test_importing_stillframe_imports_no_framework_that_it_serves():
    frameworks = {"accelerate", "lightning", "pytorch_lightning", "safetensors", "sklearn"}
    frameworks |= {"torch.distributed.checkpoint", "transformers"}
    code = f"import sys, stillframe; print(sorted({frameworks} & set(sys.modules)))"
    done = run_python("-c", code, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_is_pickled_by_its_public_name(tmp_path):
    import pickle

    import stillframe

    report = stillframe.save([1], tmp_path / "a.pt")
    pickled = pickle.dumps(report)
    assert b"stillframe._" not in pickled
    assert pickle.loads(pickled) == report
