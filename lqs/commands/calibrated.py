"""Where `lqs check --calibrate` leaves what it measured, and who finds it there again."""

from __future__ import annotations

import os
from pathlib import Path

from lqs.config import Config
from lqs.engine.store import DEFAULT_MODEL, Store, store_folder
from lqs.errors import StartError
from lqs.simulate.cost import Calibration, load_calibration


def cost_path(model: Path) -> Path:
    """Where the calibration of a model lies by itself."""
    return store_folder(os.environ) / "calibrations" / f"{model.stem}.json"


def calibrated(cost: Path, *, given: bool) -> Calibration | None:
    """What was measured before, None where nothing was. Raises ConfigError for what cannot be read."""
    return load_calibration(cost) if given or cost.exists() else None


def of_config(config: Config) -> Calibration | None:
    """What was measured of the config's first model, None where nothing was. Raises ConfigError as `calibrated`."""
    try:
        model = Store(store_folder(os.environ)).resolve(config.model.path or DEFAULT_MODEL.name)
    except StartError:
        # A simulation needs no model.
        return None
    return calibrated(cost_path(model), given=False)
