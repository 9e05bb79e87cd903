"""The demo: valid and invalid arguments, and one small run from end to end."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import demo
import options
import pytest
from fix_processes import LIGHTNING, run_python
from stillframe._shell import bench_raw

GIB = 1 << 30
DEMO = Path(demo.__file__).parent


@pytest.mark.parametrize(("text", "steps"), [("24", 24), ("100", 96)])
def test_steps_are_rounded_down_to_whole_windows(text, steps):
    assert options.steps(text) == steps


@pytest.mark.parametrize("text", ["0", "-6", "23", "many"])
def test_too_few_steps_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        options.steps(text)


def test_demo_with_bad_arguments_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        demo.main(["--size", "huge"])
    assert ended.value.code == 2
    assert "huge" in capsys.readouterr().err


def test_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000_000))
    assert demo.main(["--size", "300MB", "--dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "100 MB free" in error
    assert "--size" in error
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_reported_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_raw, "available_memory_bytes", lambda: GIB)
    assert demo.main(["--size", "300MB", "--dir", str(tmp_path)]) == 2
    assert "1.07 GB of memory are free" in capsys.readouterr().err


def test_a_directory_with_checkpoints_of_another_run_is_left_alone(tmp_path, capsys):
    kept = tmp_path / "checkpoints" / "step=16.ckpt"
    kept.parent.mkdir()
    kept.write_text("precious")
    assert demo.main(["--dir", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert kept.read_text() == "precious"


def test_a_directory_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert demo.main(["--dir", str(tmp_path / "file" / "dir")]) == 2
    assert "cannot use --dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "package"), [("lightning", "lightning"), ("sklearn", "scikit-learn")]
)
def test_a_missing_package_is_named_with_the_way_to_get_it(module, package):
    code = f"""if True:
        import sys
        sys.modules[{module!r}] = None  # importing it fails as if it were not there
        import demo
        sys.exit(demo.main(["--size", "2MB"]))"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=DEMO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"it needs {package}" in done.stderr


def run_of(save_s: float, finished_s: float | None, drift: float = 1.0):
    """Return 18 steps of 100 ms with a save after every third.

    A step that ends in a save takes `save_s` more, and each step is `drift` times as long as the
    one before."""
    from runs import Run, Save

    run = Run(starts=[0.0], grown_bytes=int(1000 * save_s))
    length = 0.1
    for step in range(24):
        saves = step % 4 == 3
        if saves:
            run.saves.append(Save("a", run.starts[-1], 0.05, 0.01, finished_s))
        run.starts.append(run.starts[-1] + length + (save_s if saves else 0.0))
        length *= drift
    run.saves[0].call_s = 9.0
    return run


def test_lost_time_compares_steps_after_a_save_with_steps_without():
    from runs import figures

    of = figures([run_of(0.3, 0.15)], [run_of(0.0, 0.0)], period=4)
    assert of.lost_s == pytest.approx(0.3)
    assert of.error_s == pytest.approx(0)
    assert of.call_s == pytest.approx(0.05)  # the first save is not among the warm ones
    assert of.first_call_s == pytest.approx(9.0)
    assert of.slowdown_s == pytest.approx(0.3 - 0.05 - 0.01)
    assert of.finished_s == pytest.approx(0.15)
    assert of.memory_bytes == 300


def test_slowing_machine_does_not_count_as_lost_time():
    assert run_of(0.0, 0.01, drift=1.01).lost(4) == pytest.approx([0.0] * 3, abs=0.004)


def test_steps_during_a_save_are_not_used_as_baseline():
    from runs import figures

    run = run_of(0.3, 0.15)
    # after its own window, so the next window's steps belong to it too
    run.saves[2].finished_s = 0.7
    run.starts = [at + (0.5 if number > 14 else 0.0) for number, at in enumerate(run.starts)]
    assert run.lost(4) == pytest.approx([0.3, 0.8, 0.3])
    # a window without a save comes before the first save
    assert run_of(0.3, None).lost(4) == pytest.approx([0.3] * 3)
    assert figures([run_of(0.3, None)], [run_of(0.0, 0.0)], period=4).finished_s is None


def test_lost_time_is_shown_with_its_error_or_left_out():
    import story
    from runs import Figures

    def shown(lost_s: float | None, error_s: float | None) -> str:
        return story._lost_time(Figures(0.1, 0.1, 0.0, lost_s, error_s, None, None))

    assert shown(0.05, 0.012) == "50 ms ± 12 ms"
    assert shown(0.05, 0.06) == "within the noise, ± 60 ms"
    assert shown(None, None) == "not measured"


@pytest.mark.slow
def test_small_demo_prints_the_table_and_leaves_nothing(tmp_path):
    done = run_demo(["--size", "3MB", "--steps", "24"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        "call",
        "wait before the step",
        "finished after",
        "extra memory",
    ):
        assert f"   {row}" in done.stdout
    assert done.stdout.count("✓") == 3
    assert "durable" in done.stdout
    assert "bit for bit" in done.stdout
    assert done.stderr == ""
    # torch keeps a cache in the temporary directory.
    assert [each for each in tmp_path.rglob("*") if "torchinductor" not in str(each)] == []


@pytest.mark.slow
def test_checkpoints_stay_in_a_directory_named_by_the_user(tmp_path):
    arguments = ["--size", "3MB", "--steps", "24", "--dir", str(tmp_path / "here")]
    # the output encoding of a plain terminal
    done = run_demo(arguments, tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ *ok ", done.stdout, re.M)) == 3
    files = sorted(path.name for path in (tmp_path / "here" / "checkpoints").iterdir())
    assert files == sorted(f"step={step}.ckpt" for step in range(4, 25, 4))


def run_demo(
    arguments: list[str], directory: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the demo in its own process, with `directory` for its temporary files."""
    if bench_raw.file_system_of(Path(tempfile.gettempdir())) == "tmpfs":
        pytest.skip("the demo keeps off a tmpfs, so where it puts its files cannot be watched")
    env = {
        **os.environ,
        "TMPDIR": str(directory),
        "COLUMNS": "100",
        **environment,
    }
    return run_python(DEMO / "demo.py", *arguments, env=env, imported=LIGHTNING)
