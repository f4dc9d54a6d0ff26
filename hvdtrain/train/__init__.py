"""The training toolkit: recipes, loops, schedules, checkpoints and progress."""
