"""An observer that writes where a run is."""

from slime_core.plugin import hook


@hook
def run_start(event):
    (event.run.run_dir / "older.log").write_text(event.run.name)
