"""Put this folder's parent on PYTHONPATH before the real trainer: the same modules, another ``__main__``."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[4] / "trainer"))
