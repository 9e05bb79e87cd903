"""LightningCLI makes the plugin and the callback from a `class_path:` of a configuration."""

import importlib
import re
from pathlib import Path

import pytest
import yaml
from fix_lightning import load, loader

PAGE = Path(__file__).parents[2] / "docs/lightning.md"


def configuration(pkg):
    """Return the configuration on the page, for one of the two packages."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)
    if pkg.name != "lightning":
        text = text.replace("stillframe.lightning", "stillframe.pytorch_lightning")
        text = text.replace("lightning.pytorch.", "pytorch_lightning.")
    return yaml.safe_load(text)


def command_line(pkg):
    package = "lightning.pytorch" if pkg.name == "lightning" else pkg.name
    return importlib.import_module(f"{package}.cli").LightningCLI


def test_class_path_of_a_configuration_makes_the_plugin(pkg, tmp_path):
    settings = configuration(pkg)
    trainer = settings["trainer"]
    trainer |= {
        "max_steps": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(tmp_path),
    }
    trainer["callbacks"].append({"class_path": f"stillframe.{pkg.name}.CPUOffloadCallback"})
    trainer["callbacks"][0]["init_args"] |= {
        "dirpath": str(tmp_path / "c"),
        "every_n_train_steps": 2,
    }
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    cli = command_line(pkg)(pkg.Model, run=False, args=["--config", str(file)])
    assert type(cli.trainer.strategy.checkpoint_io) is pkg.AsyncCheckpointIO
    cli.trainer.fit(cli.model, loader())
    (path,) = (tmp_path / "c").iterdir()
    assert load(path)["global_step"] == 4


def test_the_command_line_adds_the_plugin(pkg):
    arguments = [
        "--trainer.accelerator=cpu",
        f"--trainer.plugins+=stillframe.{pkg.name}.AsyncCheckpointIO",
        "--trainer.plugins.init_args.max_in_flight=1",
    ]
    cli = command_line(pkg)(pkg.Model, run=False, args=arguments)
    assert type(cli.trainer.strategy.checkpoint_io) is pkg.AsyncCheckpointIO


def test_an_option_that_does_not_exist_is_refused(pkg, tmp_path, capsys):
    settings = configuration(pkg)
    settings["trainer"]["plugins"][0]["init_args"] = {"max_in_fligth": 2}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit):
        command_line(pkg)(pkg.Model, run=False, args=["--config", str(file)])
    assert "max_in_fligth" in capsys.readouterr().err
