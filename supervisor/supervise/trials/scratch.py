"""The environment of an arm: its trackers and hubs are offline, and no run of before is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# Sources: the environment variables of wandb, huggingface_hub, datasets, transformers, MLflow,
# neptune and ClearML, as each of them documents its offline mode.
OFFLINE = {
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
}
# What would make an arm go on with a tracked run, or count as a part of a watched job.
RESUMING = (
    *("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID", "MLFLOW_RUN_ID", "COMET_EXPERIMENT_KEY"),
    *("NEPTUNE_CUSTOM_RUN_ID", "SUPERVISE_PROBE", "SUPERVISE_LAUNCH"),
)


def arm_environment(environ: Mapping[str, str], out: Path) -> dict[str, str]:
    """Return the environment of an arm that writes to `out`."""
    kept = {name: value for name, value in environ.items() if name not in RESUMING}
    own = {"WANDB_DIR": str(out), "MLFLOW_TRACKING_URI": (out / "mlruns").as_uri()}
    return {**kept, **OFFLINE, **own}
