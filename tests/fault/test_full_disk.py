"""A full disk and a limit on file sizes: the old file stays, and a later save works."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fix_processes import run_python

CODE = """
import errno, os, sys, torch, stillframe
small = {"w": torch.ones(10)}
def big(nbytes):
    return {"w": torch.zeros(nbytes // 4)}
def whole():
    return bool((stillframe.load("a.pt", verify=True)["w"] == 1).all())
def clean():
    return not [n for n in os.listdir(".") if n.startswith(".stillframe-")]
"""


def in_small_tmpfs(size: int, code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a private tmpfs of `size` bytes."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("unshare or mount is not installed")
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && cd "$0"'
    command = ["unshare", "-Urm", "sh", "-c"]
    if subprocess.run([*command, mount, tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs in a user namespace is not permitted")
    script = CODE + textwrap.dedent(code)
    return subprocess.run(
        [*command, f'{mount} && exec "$1" -c "$2"', tmp_path, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_full_disk_fails_the_save_and_keeps_the_old_file(tmp_path):
    done = in_small_tmpfs(
        1 << 20,
        """
        stillframe.save(small, "a.pt")
        handle = stillframe.async_save(big(4 << 20), "a.pt")
        error = handle.exception()
        assert isinstance(error, stillframe.SaveError), error
        assert error.errno == errno.ENOSPC and error.filename == "a.pt", error
        assert error.phase in ("allocate", "write"), error.phase
        assert whole() and clean()
        stillframe.save(small, "a.pt")
        stillframe.wait_all()
        print("ok", error.phase)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok")


def test_disk_with_any_too_small_room_fails_the_save_and_leaves_no_file(tmp_path):
    done = in_small_tmpfs(
        512 << 10,
        """
        stillframe.save(small, "a.pt")
        outcomes = set()
        filler = os.open("filler", os.O_CREAT | os.O_WRONLY)
        # From too full for anything to room for all, in steps of 8 KiB.
        for free in range(0, 400 << 10, 8 << 10):
            os.ftruncate(filler, 0)
            have = os.statvfs(".")
            os.posix_fallocate(filler, 0, max(1, have.f_bavail * have.f_bsize - free))
            error = stillframe.async_save(big(256 << 10), "b.pt").exception()
            outcomes.add(type(error).__name__)
            if error is not None:
                assert error.errno == errno.ENOSPC, error
                assert not os.path.exists("b.pt")
            else:
                stillframe.load("b.pt", verify=True)
                os.unlink("b.pt")
            assert whole() and clean(), free
        assert outcomes == {"SaveError", "NoneType"}, outcomes
        print("ok")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


def test_file_size_limit_raises_an_error_and_no_signal_kills(tmp_path):
    code = CODE + textwrap.dedent(
        """
        import resource
        stillframe.save(small, "a.pt")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        error = stillframe.async_save(big(4 << 20), "a.pt").exception()
        assert isinstance(error, stillframe.SaveError) and error.errno == errno.EFBIG, error
        assert whole() and clean()
        stillframe.save(small, "a.pt")
        """
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_under_lightning_fails_the_run_once_and_keeps_the_last_checkpoint(tmp_path):
    pytest.importorskip("lightning")
    done = in_small_tmpfs(
        3 << 20,
        """
        import warnings; warnings.filterwarnings("ignore")
        import logging; logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        import lightning as L
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.demos.boring_classes import BoringModel
        from stillframe.lightning import AsyncCheckpointIO
        class Model(BoringModel):
            def on_save_checkpoint(self, checkpoint):
                if self.trainer.global_step > 2:
                    checkpoint["ballast"] = torch.zeros(1 << 20)
        trainer = L.Trainer(max_steps=6, logger=False, enable_progress_bar=False, accelerator="cpu",
            enable_model_summary=False, plugins=[AsyncCheckpointIO()], limit_val_batches=0,
            callbacks=[ModelCheckpoint(".", filename="{step}", every_n_train_steps=1, save_top_k=1,
                                       monitor="step", mode="max")])
        try:
            trainer.fit(Model())
        except stillframe.SaveError as error:
            assert error.errno == errno.ENOSPC, error
        else:
            raise AssertionError("the full disk was not told")
        names = [n for n in os.listdir(".") if n.endswith(".ckpt")]
        assert names, "no checkpoint is left"
        for name in names:
            stillframe.load(name, verify=True)
        assert clean()
        print("ok")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ok\n")
