"""Users' hooks: where they run, and the values that hooks on blocks see."""
