"""What can be wrong with a job besides its configuration, found before any time is spent. No torch here."""

import importlib.util
import json
from pathlib import Path

from megamix.checkpoint.folder import MANIFEST
from megamix.config import Config, check_world_size
from megamix.data.tokenizer_bytes import ByteTokenizer
from megamix.train.build_data import data_problems
from megamix.train.run_folder import folder_problems


def job_problems(config: Config, world_size: int) -> list[str]:
    """Every problem of ranks, files and folder, one line each: field, value, fix."""
    problems = check_world_size(config, world_size)
    problems += data_problems(config)
    if config.data.tokenizer is not None:
        problems += _tokenizer_problems(config.data.tokenizer)
    if config.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        problems.append(
            "metrics.tensorboard: is true, but the package tensorboard is not installed; run "
            "pip install 'megamix[tensorboard]' or write tensorboard = false"
        )
    if config.checkpoint.resume not in ("auto", "never") and not (Path(config.checkpoint.resume) / MANIFEST).is_file():
        problems.append(
            f"checkpoint.resume: {config.checkpoint.resume} is no checkpoint; write auto, never or a path such as "
            "runs/my-run/checkpoints/step_00001000"
        )
    return [*problems, *folder_problems(config)]


def _tokenizer_problems(path: str) -> list[str]:
    # Needed only for the sample at the end: a run must not train for days to fail there.
    problems = []
    package = "sentencepiece" if path.endswith(".model") else "tokenizers"
    try:
        content = Path(path).read_bytes()
        if package == "tokenizers":
            json.loads(content)
    except OSError:
        problems.append(
            f"data.tokenizer: no file at {path}; write the path of the tokenizer.json that `megamix prepare` made, "
            "or leave the key out"
        )
    except ValueError:
        problems.append(f"data.tokenizer: {path} is no JSON; write the path of a tokenizer.json")
    if importlib.util.find_spec(package) is None and not ByteTokenizer.wrote(Path(path)):
        problems.append(
            f"data.tokenizer: is set, but the package {package} is not installed; run "
            f"pip install 'megamix[{package}]' or leave the key out"
        )
    return problems
